//! Refuses YAML that costs more than its text: aliases, each of which copies what it refers to, and deep nesting, which
//! is parsed by recursion. Checks the parser's events, which take no more room than the text.

use yaml_rust2::Event;
use yaml_rust2::parser::Parser;

/// Settings need a depth of two.
const MOST_DEPTH: usize = 16;

/// The first construct that is refused, with its line from 1. Text that is not YAML is left to the parser to refuse.
pub(super) fn refusal(text: &str) -> Option<(usize, String)> {
    let mut parser = Parser::new_from_str(text);
    let mut depth = 0_usize;
    while let Ok((event, mark)) = parser.next_token() {
        match event {
            Event::StreamEnd => return None,
            Event::Alias(_) => {
                let problem =
                    "aliases (`*name`) are not supported, since a few can expand to any amount of text; write it out";
                return Some((mark.line(), problem.to_owned()));
            }
            Event::SequenceStart(..) | Event::MappingStart(..) => depth += 1,
            Event::SequenceEnd | Event::MappingEnd => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MOST_DEPTH {
            return Some((mark.line(), format!("is nested more than {MOST_DEPTH} times")));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aliases_and_deep_nesting_are_found_with_their_lines() {
        assert_eq!(refusal("a: &x 1\nb: '*x'\nc: |\n  *x\n# *x\n"), None, "an anchor without an alias copies nothing");
        assert_eq!(refusal("a: &x 1\n\nb: [1, *x]\n").expect("an alias").0, 3);
        assert_eq!(refusal(": : [}"), None, "left to the parser to refuse");
        for text in ["- ".repeat(100_000), "[".repeat(100), "{a: ".repeat(100), "? ".repeat(100_000)] {
            let refused = refusal(&text);
            assert!(refused.as_ref().is_some_and(|(line, why)| *line == 1 && why.contains("nested")), "{refused:?}");
        }
    }
}
