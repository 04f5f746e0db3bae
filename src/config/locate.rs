//! Finds the line of a TOML or YAML file that sets a dotted key: the `config` crate records the file, not the line.

/// The line, from 1, that sets `key`.
pub(super) fn line_of(text: &str, key: &str) -> Option<usize> {
    let mut section: Vec<String> = Vec::new();
    // YAML's nesting: the indentation and name of each open mapping.
    let mut nesting: Vec<(usize, String)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with('#') {
            continue;
        }
        if let Some(header) = trimmed.strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            section = header.split('.').map(unquote).collect();
            continue;
        }
        let Some(end) = trimmed.find(['=', ':']) else { continue };
        let name = trimmed.get(..end).unwrap_or_default();
        let path = if trimmed.as_bytes().get(end) == Some(&b'=') {
            section.iter().cloned().chain(name.split('.').map(unquote)).collect::<Vec<_>>()
        } else {
            let indent = line.len() - line.trim_start().len();
            nesting.retain(|(outer, _)| *outer < indent);
            nesting.push((indent, unquote(name)));
            nesting.iter().map(|(_, name)| name.clone()).collect()
        };
        if path.join(".") == key {
            return Some(number + 1);
        }
    }
    None
}

fn unquote(name: &str) -> String {
    name.trim().trim_matches(['"', '\'']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::line_of;

    #[test]
    fn finds_keys_in_both_formats() {
        let toml = "listen = \"x\"\n\n[sampling]\n# a comment: period = 1\nperiod = \"1ms\"\n[a.b]\nc.d = 1\n";
        assert_eq!(line_of(toml, "listen"), Some(1));
        assert_eq!(line_of(toml, "sampling.period"), Some(5));
        assert_eq!(line_of(toml, "a.b.c.d"), Some(7));
        assert_eq!(line_of(toml, "period"), None);
        let yaml = "listen: x\nsampling:\n  period: 1ms\nring:\n  retention: 10m\n";
        assert_eq!(line_of(yaml, "sampling.period"), Some(3));
        assert_eq!(line_of(yaml, "ring.retention"), Some(5));
    }
}
