//! The key of a job: its name, and the scope within which that name is unique.
//!
//! Two teams of a node call their jobs `train`. So a job's key is the namespace of its pod, or else the user, and the name.

use crate::scope::Scope;
use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

/// A job's key. A copy is cheap.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(Arc<(Scope, Arc<str>)>);

impl JobId {
    /// The job of this name within this scope.
    #[must_use]
    pub fn new(scope: Scope, name: &str) -> Self {
        Self(Arc::new((scope, name.into())))
    }

    /// Its name, as its processes say it.
    #[must_use]
    pub fn name(&self) -> &Arc<str> {
        &self.0.1
    }

    /// Whose it is.
    #[must_use]
    pub fn scope(&self) -> &Scope {
        &self.0.0
    }

    /// One text for it: `NAMESPACE/NAME`, `USER/NAME`, or the name of a job of the daemon's own.
    #[must_use]
    pub fn text(&self) -> String {
        match self.scope() {
            Scope::Daemon => self.name().to_string(),
            Scope::User(owner) | Scope::Namespace(owner) => format!("{owner}/{}", self.name()),
        }
    }

    /// Whether this text, from a query, names the job: it is the job's name alone, or [`text`](Self::text).
    #[must_use]
    pub fn is_meant_by(&self, text: &str) -> bool {
        **self.name() == *text || self.text() == text
    }
}

/// A job for people: `NAMESPACE/NAME`, or the name alone.
impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.scope() {
            Scope::Namespace(namespace) => write!(f, "{namespace}/{}", self.name()),
            Scope::Daemon | Scope::User(_) => f.write_str(self.name()),
        }
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

/// A job of the daemon's own.
impl From<&str> for JobId {
    fn from(name: &str) -> Self {
        Self::new(Scope::Daemon, name)
    }
}

/// What a job is looked up by, without making a key of it.
pub(super) trait Key {
    fn parts(&self) -> (&Scope, &str);
}

impl Key for JobId {
    fn parts(&self) -> (&Scope, &str) {
        (self.scope(), self.name())
    }
}

impl Key for (&Scope, &str) {
    fn parts(&self) -> (&Scope, &str) {
        *self
    }
}

impl<'a> Borrow<dyn Key + 'a> for JobId {
    fn borrow(&self) -> &(dyn Key + 'a) {
        self
    }
}

impl PartialEq for dyn Key + '_ {
    fn eq(&self, other: &Self) -> bool {
        self.parts() == other.parts()
    }
}

impl Eq for dyn Key + '_ {}

impl PartialOrd for dyn Key + '_ {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for dyn Key + '_ {
    fn cmp(&self, other: &Self) -> Ordering {
        self.parts().cmp(&other.parts())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn one_name_is_a_job_for_each_owner() {
        let scopes = [Scope::of(None, None), Scope::of(None, Some("1000")), Scope::of(Some("team-a"), Some("0"))];
        let ids = scopes.clone().map(|scope| JobId::new(scope, "train"));
        assert_eq!(ids.each_ref().map(JobId::text), ["train", "1000/train", "team-a/train"]);
        assert_eq!(ids.each_ref().map(ToString::to_string), ["train", "train", "team-a/train"]);
        let jobs: BTreeMap<JobId, usize> = ids.into_iter().zip(0..).collect();
        let found = scopes.each_ref().map(|scope| jobs.get(&(scope, "train") as &dyn Key).copied());
        assert_eq!(found, [Some(0), Some(1), Some(2)]);
        assert_eq!(jobs.get(&(&Scope::of(Some("team-b"), None), "train") as &dyn Key), None);
    }

    #[test]
    fn a_reader_means_a_job_by_its_name_or_with_its_owner() {
        let id = JobId::new(Scope::of(Some("team-a"), None), "train");
        assert!(id.is_meant_by("train") && id.is_meant_by("team-a/train") && !id.is_meant_by("team-b/train"));
        assert_eq!((id.scope().namespace(), id.scope().user()), (Some("team-a"), None));
        assert_eq!(Scope::of(Some(""), Some("7")).user(), Some("7"), "an empty text is none");
    }
}
