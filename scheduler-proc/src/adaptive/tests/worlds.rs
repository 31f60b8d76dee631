//! Whole courses of steps: how fast the chosen depths are against plain decoding and against the best fixed depth, and
//! how often they change.

use super::*;
use crate::engine::rng::uniform;

/// What drafts are worth, and what steps cost, in seconds.
#[derive(Debug, Clone, Copy)]
struct World {
    /// Chance of the first draft, and of every later one after those before it.
    first: f64,
    next: f64,
    /// Of a step, of a row of it beyond the free ones, and of a level of drafts.
    step: f64,
    row: f64,
    free_rows: usize,
    level: f64,
    /// Share by which times scatter.
    noise: f64,
    /// How many times slower all steps are when others use the machine, which comes and goes.
    busy: f64,
}

/// A machine that streams weights and verifies sixteen rows for nothing.
const MACHINE: World = World {
    first: 0.0,
    next: 0.0,
    step: 0.012,
    row: 0.0004,
    free_rows: 16,
    level: 0.0,
    noise: 0.05,
    busy: 1.0,
};
/// N-grams on everyday questions: few matches.
const HARD: World = World { first: 0.2, next: 0.4, ..MACHINE };
/// The same on a text that is copied.
const EASY: World = World { first: 0.6, next: 0.9, ..MACHINE };
/// A head that costs a tenth of a step per level, and is mostly right.
const HEAD: World = World { first: 0.8, next: 0.75, level: 0.0012, ..MACHINE };
/// A draft model that is as dear as it is useless.
const BURDEN: World = World { first: 0.1, next: 0.1, level: 0.01, ..MACHINE };

impl World {
    fn seconds(&self, batch: usize, depth: usize) -> f64 {
        let rows = (batch * (depth + 1)).saturating_sub(self.free_rows) as f64;
        self.step + self.row * rows + self.level * depth as f64
    }

    fn accepted(&self, depth: usize, draw: impl Fn(u32) -> f64) -> usize {
        let chance = |position: usize| if position == 0 { self.first } else { self.next };
        (0..depth).take_while(|&position| draw(position as u32) < chance(position)).count()
    }

    fn mean(&self, depth: usize) -> f64 {
        (0..depth).map(|position| self.first * self.next.powi(position as i32)).sum()
    }

    fn rate(&self, batch: usize, depth: usize) -> f64 {
        batch as f64 * (1.0 + self.mean(depth)) / self.seconds(batch, depth)
    }
}

/// A course of steps through worlds.
struct Course {
    depth: AdaptiveDepth,
    seed: u64,
    step: u64,
}

/// What a stretch of it made.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    rate: f64,
    switches: usize,
}

impl Course {
    fn new(slots: Vec<AdaptiveSlot>, seed: u64) -> Self {
        Self { depth: depth_of(slots), seed, step: 0 }
    }

    fn ngram(seed: u64) -> Self {
        Self::new(
            vec![ours(1, &[0, 1, 3, 7, 11]), ours(8, &[0, 1, 3, 7]), ours(32, &[0, 1, 3]), ours(64, &[0, 1])],
            seed,
        )
    }

    fn head(seed: u64) -> Self {
        Self::new(
            vec![ours(1, &[0, 1, 3, 5, 7]), ours(8, &[0, 1, 3]), ours(32, &[0, 1]), ours(64, &[0])],
            seed,
        )
    }

    fn run(&mut self, world: World, batch: usize, steps: usize) -> Stretch {
        let (mut seconds, mut tokens) = (0.0, 0);
        for _ in 0..steps {
            self.step += 1;
            let depth = self.depth.choose(batch, true).num_steps as usize;
            let (seed, first) = (self.seed, self.step * 1000);
            let accepted: Vec<_> = (first..first + batch as u64)
                .map(|row| world.accepted(depth, |position| uniform(seed, row, position)))
                .collect();
            let scatter = uniform(self.seed ^ 99, self.step, 0) - 0.5;
            let busy = if uniform(self.seed ^ 77, self.step / 70, 0) < 0.5 { 1.0 } else { world.busy };
            // What the machine's other users cost is nobody's fault here.
            seconds += world.seconds(batch, depth);
            let took = world.seconds(batch, depth) * (1.0 + 2.0 * world.noise * scatter) * busy;
            tokens += batch + accepted.iter().sum::<usize>();
            self.depth.observe(&Observation {
                batch,
                speculating: batch,
                accepted: &accepted,
                seconds: Some(took),
            });
        }
        let switches = self.depth.take_switches().len();
        Stretch { rate: tokens as f64 / seconds, switches }
    }
}

const BATCHES: [usize; 9] = [1, 2, 4, 8, 12, 16, 24, 32, 64];

/// The promise: wherever speculation cannot pay, at most 3 % are lost; and wherever it can, most of it is had.
#[test]
fn never_much_slower_than_plain_and_near_the_best_depth() {
    for (name, world, start) in [
        ("hard", HARD, Course::ngram as fn(u64) -> Course),
        ("easy", EASY, Course::ngram),
        ("head", HEAD, Course::head),
        ("burden", BURDEN, Course::head),
    ] {
        for batch in BATCHES {
            for seed in 0..5 {
                let mut course = start(seed);
                let begin = course.run(world, batch, 200);
                let stretch = course.run(world, batch, 3000);
                let plain = world.rate(batch, 0);
                let slots = &course.depth.slots;
                let depths = slots[course.depth.active].candidates_steps();
                let best = depths.into_iter().map(|depth| world.rate(batch, depth)).fold(0.0, f64::max);
                let what =
                    format!("{name} at {batch}, seed {seed}: {stretch:?}, plain {plain:.1}, best {best:.1}");
                assert!(begin.rate > 0.8 * plain, "the start of {what}");
                assert!(stretch.rate > 0.97 * plain, "{what}");
                assert!(stretch.rate > 0.9 * best, "{what}");
                assert!(stretch.switches <= 20, "flaps: {what}");
            }
        }
    }
}

/// Up on what is easy, down on what is hard, and up again, in time.
#[test]
fn follows_what_is_asked() {
    for batch in [1, 8] {
        for seed in 0..5 {
            let mut course = Course::ngram(seed);
            course.run(EASY, batch, 600);
            let plain = HARD.rate(batch, 0);
            for round in 0..4 {
                let hard = course.run(HARD, batch, 1500);
                let easy = course.run(EASY, batch, 1500);
                let what = format!("batch {batch}, seed {seed}, round {round}: {hard:?} {easy:?}");
                assert!(hard.rate > 0.95 * plain, "{what}");
                assert!(easy.rate > 1.3 * plain, "{what}");
            }
        }
    }
}

/// Machines that are three times slower now and then: times of then are no reason now.
#[test]
fn a_busy_machine_confuses_nobody() {
    for (name, world) in [("hard", HARD), ("easy", EASY)] {
        let world = World { busy: 3.0, noise: 0.15, ..world };
        for batch in BATCHES {
            for seed in 0..5 {
                let mut course = Course::ngram(seed);
                course.run(world, batch, 200);
                let stretch = course.run(world, batch, 3000);
                let what =
                    format!("{name} at {batch}, seed {seed}: {stretch:?}, plain {}", world.rate(batch, 0));
                assert!(stretch.rate > 0.97 * world.rate(batch, 0), "{what}");
                assert!(stretch.switches <= 30, "{what}");
            }
        }
    }
}

/// Two depths that are equally fast: noise must not make it restless.
#[test]
fn equal_depths_do_not_flap() {
    let world = World { first: 0.5, next: 0.0, free_rows: 8, row: 0.00075, noise: 0.15, ..MACHINE };
    for seed in 0..10 {
        let mut course = Course::new(vec![ours(1, &[0, 1])], seed);
        let stretch = course.run(world, 8, 5000);
        assert!(stretch.switches <= 20, "seed {seed}: {stretch:?}");
        assert!(stretch.rate > 0.97 * world.rate(8, 0), "seed {seed}: {stretch:?}");
    }
}

/// Times of one batch size say nothing of another.
#[test]
fn every_batch_size_has_its_own_times() {
    let mut course = Course::ngram(3);
    course.run(EASY, 1, 500);
    let deep = course.depth.steps();
    assert!(deep >= 3, "{deep}");
    // At sixteen rows every draft costs, and none is right.
    let hard = World { first: 0.0, ..HARD };
    let wide = course.run(hard, 16, 1500);
    assert!(wide.rate > 0.96 * hard.rate(16, 0), "{wide:?}");
    let back = course.run(EASY, 1, 100);
    assert!(back.rate > 1.2 * EASY.rate(1, 0), "{back:?}");
}
