//! Tests of what a corpus keeps, and of what it forgets after a kill.

use super::*;

fn header() -> CorpusHeader {
    CorpusHeader {
        version: CorpusHeader::VERSION,
        model: "tiny".into(),
        vocab_size: 16,
        hidden_size: 2,
        layers: vec![1, 2, 3],
        seed: 7,
    }
}

/// A conversation of `len` tokens, and rows whose bytes say whose they are.
fn conversation(job: u64, len: usize) -> (Sequence, HiddenBytes) {
    let sequence = Sequence {
        job,
        prompt: format!("p{job}"),
        split: Split::Train,
        answers: vec![(1, len)],
        temperatures: vec![0.0],
        tokens: (0..len as TokenId).collect(),
    };
    let bytes = |width: usize| vec![job as u8; (len - 1) * width * VALUE_BYTES as usize];
    (sequence, HiddenBytes { layers: bytes(6), last: bytes(2) })
}

fn filled(dir: &Path, lengths: &[usize]) {
    let mut writer = CorpusWriter::open(dir, &header()).unwrap();
    for (job, &len) in lengths.iter().enumerate() {
        let (sequence, hidden) = conversation(job as u64, len);
        writer.push(sequence, &hidden).unwrap();
    }
}

fn jobs(dir: &Path) -> Vec<u64> {
    Corpus::open(dir).unwrap().sequences().iter().map(|sequence| sequence.job).collect()
}

fn cut(path: &Path, by: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() - by).unwrap();
}

#[test]
fn what_was_written_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path(), &[3, 5, 4]);
    let corpus = Corpus::open(dir.path()).unwrap();
    assert_eq!(corpus.sequences()[1], conversation(1, 5).0);
    assert_eq!(corpus.hidden(1, 4, Feature::Final).unwrap(), conversation(1, 5).1.last);
    assert_eq!(corpus.hidden(2, 3, Feature::Layers).unwrap(), conversation(2, 4).1.layers);
    assert_eq!(corpus.hidden(2, 1, Feature::Layers).unwrap(), vec![2; 12]);
}

#[test]
fn a_half_written_tail_is_cut_off_and_writing_goes_on() {
    for (file, by) in [(SEQUENCES, 1), (SEQUENCES, 20), ("final.bf16", 1), ("layers.bf16", 30)] {
        let dir = tempfile::tempdir().unwrap();
        filled(dir.path(), &[3, 5, 4]);
        cut(&dir.path().join(file), by);
        assert_eq!(jobs(dir.path()), [0, 1], "{file} cut by {by}");
        let mut writer = CorpusWriter::open(dir.path(), &header()).unwrap();
        let (sequence, hidden) = conversation(9, 6);
        writer.push(sequence, &hidden).unwrap();
        assert_eq!(jobs(dir.path()), [0, 1, 9], "{file} cut by {by}");
        let corpus = Corpus::open(dir.path()).unwrap();
        assert_eq!(corpus.hidden(2, 5, Feature::Layers).unwrap(), hidden.layers);
        assert_eq!(corpus.hidden(2, 5, Feature::Final).unwrap(), hidden.last);
    }
}

#[test]
fn rows_without_their_line_are_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path(), &[3, 5]);
    let mut file = OpenOptions::new().append(true).open(dir.path().join("final.bf16")).unwrap();
    file.write_all(&[77; 9]).unwrap();
    filled(dir.path(), &[4]);
    let corpus = Corpus::open(dir.path()).unwrap();
    assert_eq!(corpus.hidden(2, 3, Feature::Final).unwrap(), conversation(0, 4).1.last);
}

#[test]
fn another_targets_corpus_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path(), &[3]);
    let other = CorpusHeader { hidden_size: 4, ..header() };
    assert!(CorpusWriter::open(dir.path(), &other).is_err());
}

#[test]
fn hidden_states_of_another_length_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = CorpusWriter::open(dir.path(), &header()).unwrap();
    let (sequence, _) = conversation(0, 4);
    assert!(writer.push(sequence, &conversation(0, 5).1).is_err());
}
