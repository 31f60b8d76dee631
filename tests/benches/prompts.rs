//! Owns the prompts of the benchmark, in the default model's chat format.

const QUESTIONS: [&str; 8] = [
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I pack for a week of hiking in the mountains?",
    "Describe how bread is made, from flour to the finished loaf.",
    "Give me advice on how to prepare for a job interview.",
    "What are the main differences between cats and dogs as pets?",
    "Tell me about the history of the bicycle.",
    "How can I learn to play the guitar as an adult?",
];

const PASSAGE: &str = "The harbour master keeps a book. In the book she writes the name of every ship, the hour \
    of its arrival, the number of its crew and the cargo it carries. The Albatross came at six with twelve men \
    and forty barrels of oil. The Heron came at eight with nine men and two hundred sacks of flour. The Petrel \
    came at noon with seven men and a hundred crates of oranges.";

/// Everyday questions: little of the answer stands in the prompt.
pub(crate) fn chat(count: usize) -> Vec<String> {
    questions(count).iter().map(|question| wrap(question)).collect()
}

/// Their texts alone.
pub(crate) fn questions(count: usize) -> Vec<String> {
    let question = |index: usize| match index / QUESTIONS.len() {
        0 => QUESTIONS[index].to_owned(),
        round => format!("{} Give {round} examples.", QUESTIONS[index % QUESTIONS.len()]),
    };
    (0..count).map(question).collect()
}

/// Tasks whose answer copies the prompt.
pub(crate) fn copy(count: usize) -> Vec<String> {
    copies(count).iter().map(|task| wrap(task)).collect()
}

/// Their texts alone.
pub(crate) fn copies(count: usize) -> Vec<String> {
    let tasks = [
        "Repeat the following text word for word, three times",
        "Copy this text exactly, then copy it again",
    ];
    (0..count).map(|i| format!("{} ({}):\n\n{PASSAGE}", tasks[i % tasks.len()], i + 1)).collect()
}

/// About a thousand tokens of text that begin differently in every round.
pub(crate) fn long(round: usize) -> String {
    let ships = (0..12).map(|ship| format!("{PASSAGE} That was page {}.", round * 100 + ship));
    format!("Log {round}. {}", ships.collect::<Vec<_>>().join(" "))
}

/// A prompt of ordinary token ids that differs from its first token on.
pub(crate) fn tokens(round: usize, count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| 1000 + (i * 7919 + round as u32 * 104_729 + 31) % 40_000).collect()
}

fn wrap(content: &str) -> String {
    format!("<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n")
}
