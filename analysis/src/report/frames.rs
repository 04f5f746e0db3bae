//! The frames of a call stack, as texts `file:line:function`.

use std::sync::Arc;

/// Whether a frame is of Python: others have no file, or one of another language.
pub(super) fn is_python(frame: &str) -> bool {
    let has_line = |(at, mark): (usize, &str)| {
        frame[at + mark.len()..].starts_with(|one: char| one.is_ascii_digit() || one == '?')
    };
    frame.match_indices(".py:").chain(frame.match_indices(">:")).any(has_line)
}

/// The frames of Python, the innermost first.
pub(super) fn of_python(frames: &[Arc<str>]) -> impl Iterator<Item = &Arc<str>> {
    frames.iter().filter(|frame| is_python(frame))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_python_have_a_file_of_python_and_a_line() {
        for frame in ["/a/train.py:14:step", "<ipython-input-3>:2:<module>", "<eval_with_key>.0>:5:forward", "x.py:?:f"]
        {
            assert!(is_python(frame), "{frame}");
        }
        for frame in ["??:0:torch::unwind::unwind()", "a.cpp:3:f<int>::g", ":0:x.py::y", "a.pyx:3:f", "", "é>:é"] {
            assert!(!is_python(frame), "{frame}");
        }
    }
}
