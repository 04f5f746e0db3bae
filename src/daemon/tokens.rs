//! The tokens for annotations over TCP, from their files.
//!
//! Enters: the settings' paths. Leaves: the tokens, or the first fault, which names its file. Invariant: no two are equal, so that
//! each names one owner. Absent on purpose: reading them again; a new token takes effect at the next start.

use crate::config::Settings;
use crate::web::annotations::Tokens;
use anyhow::{Context as _, bail, ensure};
use highwater_engine::files::read_text;
use std::path::Path;
use std::sync::Arc;

/// A larger file cannot be a token file.
const MOST_BYTES: u64 = 64 << 10;
/// The shortest token, bytes.
const LEAST_BYTES: usize = 16;
/// The longest name of a namespace, which is a DNS label, bytes.
const MOST_NAME_BYTES: usize = 63;
/// The most namespaces with a token.
const MOST_NAMESPACES: usize = 1_024;

/// Every token that the settings name.
pub(super) fn read(settings: &Settings) -> anyhow::Result<Tokens> {
    let of_all = settings.token_file.as_deref().map(|path| token(path, "annotations.token_file")).transpose()?;
    let folder = settings.namespace_tokens.as_deref();
    let tokens = Tokens { of_all, of_namespaces: folder.map(of_namespaces).transpose()?.unwrap_or_default() };
    let mut all: Vec<_> = tokens.of_namespaces.iter().map(|(name, token)| (token, &**name)).collect();
    all.extend(tokens.of_all.iter().map(|token| (token, "annotations.token_file")));
    all.sort_unstable();
    for pair in all.windows(2) {
        if let [(token, one), (same, other)] = pair
            && token == same
        {
            bail!("annotations.namespace_tokens: {one} and {other} have the same token");
        }
    }
    Ok(tokens)
}

/// The tokens in a folder, by the names of their files. Kubernetes keeps a Secret's files behind names that begin with a point.
fn of_namespaces(folder: &Path) -> anyhow::Result<Vec<(Arc<str>, Box<str>)>> {
    let setting = "annotations.namespace_tokens";
    let read = || format!("{setting}: cannot read {}", folder.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(read)? {
        let name = entry.with_context(read)?.file_name();
        let Some(name) = name.to_str().filter(|name| is_namespace(name)) else {
            let is_hidden = name.as_encoded_bytes().starts_with(b".");
            ensure!(is_hidden, "{setting}: {} is not the name of a namespace", folder.join(name).display());
            continue;
        };
        ensure!(found.len() < MOST_NAMESPACES, "{setting}: {} has more than {MOST_NAMESPACES} files", folder.display());
        found.push((Arc::from(name), token(&folder.join(name), setting)?));
    }
    ensure!(!found.is_empty(), "{setting}: {} has no file", folder.display());
    Ok(found)
}

fn token(path: &Path, setting: &str) -> anyhow::Result<Box<str>> {
    let token = read_text(path, MOST_BYTES).with_context(|| format!("{setting}: cannot read {}", path.display()))?;
    let is_long = token.trim().len() >= LEAST_BYTES;
    ensure!(is_long, "{setting}: the token in {} is shorter than {LEAST_BYTES} characters", path.display());
    Ok(token.trim().into())
}

/// Whether it is a DNS label.
fn is_namespace(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_bounded = !name.is_empty() && name.len() <= MOST_NAME_BYTES;
    is_bounded && name.bytes().all(is_plain) && !name.starts_with('-') && !name.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_of_the_folder_is_a_namespaces_token() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokens");
        // As Kubernetes mounts a Secret.
        std::fs::create_dir_all(path.join("..data")).expect("a folder");
        let write = |name: &str, token: &str| std::fs::write(path.join("..data").join(name), token).expect("written");
        write("research", "0123456789abcdef\n");
        write("serving", "fedcba9876543210");
        for name in ["research", "serving"] {
            std::os::unix::fs::symlink(format!("..data/{name}"), path.join(name)).expect("a link");
        }
        let mut settings = Settings { namespace_tokens: Some(path.clone()), ..Settings::default() };
        let mut tokens = read(&settings).expect("good");
        tokens.of_namespaces.sort();
        let expected: [(Arc<str>, Box<str>); 2] =
            [("research".into(), "0123456789abcdef".into()), ("serving".into(), "fedcba9876543210".into())];
        assert_eq!((tokens.of_all, &*tokens.of_namespaces), (None, &expected[..]));
        let fault = |settings: &Settings| format!("{:#}", read(settings).expect_err("a fault"));
        let all = folder.path().join("all");
        std::fs::write(&all, "0123456789abcdef").expect("written");
        settings.token_file = Some(all);
        assert_eq!(
            fault(&settings),
            "annotations.namespace_tokens: annotations.token_file and research have the same token"
        );
        settings.token_file = None;
        write("serving", "0123456789abcdef");
        assert_eq!(fault(&settings), "annotations.namespace_tokens: research and serving have the same token");
        write("serving", "short");
        assert!(fault(&settings).ends_with("serving is shorter than 16 characters"), "{}", fault(&settings));
        std::fs::remove_file(path.join("..data/serving")).expect("removed");
        assert!(fault(&settings).contains("cannot read"), "{}", fault(&settings));
        std::fs::remove_file(path.join("serving")).expect("removed");
        std::fs::write(path.join("No_Namespace"), "0123456789abcdef").expect("written");
        assert!(fault(&settings).ends_with("No_Namespace is not the name of a namespace"), "{}", fault(&settings));
        settings.namespace_tokens = Some(path.join("..data/none"));
        assert!(fault(&settings).contains("cannot read"), "{}", fault(&settings));
        let empty = folder.path().join("empty");
        std::fs::create_dir(&empty).expect("a folder");
        settings.namespace_tokens = Some(empty);
        assert!(fault(&settings).ends_with("has no file"), "{}", fault(&settings));
    }
}
