//! Places in a program: the frames of a stack as texts, and the one of them that people know it by.
//!
//! Enters: stacks by number. Leaves: their frames, each once as a text, and the innermost frame of the program's own code.

use super::stacks::{Frame, NO_LINE, Stacks};
use highwater_engine::recording::{Place, printable};
use std::collections::HashMap;
use std::sync::Arc;

/// The most frames of a stack that are listed, and the longest name of a file or function, characters.
const MOST_FRAMES: usize = 64;
const LONGEST_NAME: usize = 150;
/// Parts of the paths of Python files that are not the program's own: PyTorch, other packages, Python itself.
const NOT_OWN: [&str; 4] = ["/torch/", "site-packages/", "dist-packages/", "<frozen "];

/// The places of a snapshot.
#[derive(Debug)]
pub(super) struct Places<'a> {
    stacks: &'a Stacks,
    /// The texts of frames so far, by the frame's number.
    shown: HashMap<u32, Arc<str>>,
}

impl<'a> Places<'a> {
    /// Those of these stacks.
    pub fn of(stacks: &'a Stacks) -> Self {
        Self { stacks, shown: HashMap::new() }
    }

    /// The place of a stack.
    pub fn place(&mut self, stack: u32) -> Place {
        let stacks = self.stacks;
        let numbers = stacks.stack_of(stack);
        let text = |number: &u32| {
            let Frame { name, file, line } = stacks.frame_of(*number);
            (stacks.text_of(file), line, stacks.text_of(name))
        };
        let file = |number: &&u32| text(number).0;
        let site = numbers
            .iter()
            .find(|number| is_own(file(number)))
            .or_else(|| numbers.iter().find(|number| is_of_python(file(number))));
        let site = site
            .map(|number| shown(text(number)))
            .or_else(|| of_cpp(numbers.iter().map(|number| text(number).2)))
            .or_else(|| numbers.last().map(|number| shown(text(number))));
        let frame = |number: &u32| Arc::clone(self.shown.entry(*number).or_insert_with(|| shown(text(number)).into()));
        let more_frames = numbers.len().saturating_sub(MOST_FRAMES);
        Place { site, more_frames, frames: numbers.iter().take(MOST_FRAMES).map(frame).collect() }
    }
}

fn shown((file, line, name): (&str, u32, &str)) -> String {
    let end: String = file.chars().rev().take(LONGEST_NAME).collect();
    let (file, name): (String, String) = (end.chars().rev().collect(), name.chars().take(LONGEST_NAME).collect());
    let line = if line == NO_LINE { "?".to_owned() } else { line.to_string() };
    printable(&format!("{file}:{line}:{name}"))
}

fn is_of_python(file: &str) -> bool {
    file.ends_with(".py") || file.starts_with("<ipython")
}

fn is_own(file: &str) -> bool {
    is_of_python(file) && !NOT_OWN.iter().any(|part| file.contains(part))
}

/// What PyTorch did, by the names of its C++ functions, innermost first. For stacks without Python frames, such as those of the
/// threads of the backward pass.
fn of_cpp<'a>(names: impl DoubleEndedIterator<Item = &'a str> + Clone) -> Option<String> {
    let word =
        |text: &str| text.split(|one: char| !one.is_alphanumeric() && one != '_').next().unwrap_or_default().to_owned();
    let mut passes = names
        .clone()
        .filter_map(|name| name.strip_prefix("torch::autograd::generated::").filter(|rest| rest.contains("::apply(")));
    let mut operators = names.rev().filter_map(|name| name.strip_prefix("at::_ops::"));
    let pass = passes.next().map(|rest| printable(&format!("backward pass, {}", word(rest))));
    pass.or_else(|| operators.next().map(|rest| printable(&format!("operator {}", word(rest)))))
}
