//! Owns the pictures of a training: line charts as SVG, written by hand so that they need no fonts and no library.

use std::fmt::Write;

/// One line of a chart.
#[derive(Debug, Clone)]
pub(super) struct Line {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    pub dashed: bool,
}

/// A chart with its axes.
#[derive(Debug, Clone)]
pub(super) struct Chart {
    pub title: String,
    pub x: String,
    pub y: String,
    pub lines: Vec<Line>,
}

const SIZE: (f64, f64) = (760.0, 420.0);
const MARGIN: (f64, f64, f64, f64) = (60.0, 40.0, 170.0, 50.0);
const COLORS: [&str; 8] =
    ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f"];
const TICKS: usize = 5;

/// What of the plane is shown.
#[derive(Debug, Clone, Copy)]
struct Frame {
    x: (f64, f64),
    y: (f64, f64),
}

impl Frame {
    fn around(lines: &[Line]) -> Self {
        let points = lines.iter().flat_map(|line| &line.points).copied().filter(|(x, y)| (x + y).is_finite());
        let span = |values: Vec<f64>| {
            let low = values.iter().copied().fold(f64::INFINITY, f64::min);
            let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            match low < high {
                true => (low, high),
                false if low.is_finite() => (low - 0.5, low + 0.5),
                false => (0.0, 1.0),
            }
        };
        let (x, y): (Vec<f64>, Vec<f64>) = points.unzip();
        Self { x: span(x), y: span(y) }
    }

    fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let (left, top, right, bottom) = MARGIN;
        let share = |value: f64, (low, high): (f64, f64)| (value - low) / (high - low);
        let wide = SIZE.0 - left - right;
        let high = SIZE.1 - top - bottom;
        (left + wide * share(x, self.x), top + high * (1.0 - share(y, self.y)))
    }
}

impl Chart {
    pub(super) fn svg(&self) -> String {
        let frame = Frame::around(&self.lines);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
            SIZE.0, SIZE.1
        );
        text(&mut svg, (MARGIN.0, 24.0), "start", &self.title);
        text(&mut svg, ((MARGIN.0 + SIZE.0 - MARGIN.2) / 2.0, SIZE.1 - 12.0), "middle", &self.x);
        text(&mut svg, (MARGIN.0 - 8.0, MARGIN.1 - 8.0), "end", &self.y);
        self.grid(&frame, &mut svg);
        for (at, line) in self.lines.iter().enumerate() {
            self.line(&frame, at, line, &mut svg);
        }
        svg + "</svg>\n"
    }

    fn grid(&self, frame: &Frame, svg: &mut String) {
        for tick in 0..=TICKS {
            let share = tick as f64 / TICKS as f64;
            let at = |(low, high): (f64, f64)| low + (high - low) * share;
            let (x, y) = (at(frame.x), at(frame.y));
            let (left, row) = frame.place((frame.x.0, y));
            let (right, _) = frame.place((frame.x.1, y));
            let (column, bottom) = frame.place((x, frame.y.0));
            let _ = writeln!(
                svg,
                "<line x1=\"{left:.1}\" y1=\"{row:.1}\" x2=\"{right:.1}\" y2=\"{row:.1}\" stroke=\"#ddd\"/>"
            );
            text(svg, (left - 8.0, row + 4.0), "end", &number(y));
            text(svg, (column, bottom + 18.0), "middle", &number(x));
        }
    }

    fn line(&self, frame: &Frame, at: usize, line: &Line, svg: &mut String) {
        let color = COLORS[at % COLORS.len()];
        let dashes = if line.dashed { " stroke-dasharray=\"5 4\"" } else { "" };
        let points: Vec<String> = line
            .points
            .iter()
            .filter(|(x, y)| (x + y).is_finite())
            .map(|&point| frame.place(point))
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"1.6\"{dashes} points=\"{}\"/>",
            points.join(" ")
        );
        let (x, y) = (SIZE.0 - MARGIN.2 + 12.0, MARGIN.1 + 14.0 + 18.0 * at as f64);
        let _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" stroke=\"{color}\" stroke-width=\"2\"{dashes}/>",
            y - 4.0,
            x + 22.0,
            y - 4.0
        );
        text(svg, (x + 28.0, y), "start", &line.name);
    }
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, content: &str) {
    let content = content.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>");
}

fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_stay_inside_the_frame_and_odd_values_are_left_out() {
        let chart = Chart {
            title: "loss < 1 & falling".into(),
            x: "step".into(),
            y: "loss".into(),
            lines: vec![Line {
                name: "a".into(),
                points: vec![(0.0, 2.0), (10.0, 1.0), (20.0, f64::NAN)],
                dashed: true,
            }],
        };
        let svg = chart.svg();
        assert!(svg.contains("points=\"60.0,40.0 590.0,370.0\""), "{svg}");
        assert!(svg.contains("loss &lt; 1 &amp; falling") && !svg.contains("NaN"));
        let nothing = Chart { lines: Vec::new(), ..chart };
        assert!(nothing.svg().ends_with("</svg>\n"));
    }
}
