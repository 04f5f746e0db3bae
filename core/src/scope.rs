//! The scope of a job's name: within one scope, a name means one job.

use std::sync::Arc;

/// The user, the namespace or the daemon, whose jobs' names are distinct: within one scope, a name means one job.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// The daemon's own: jobs of a simulator or of a recording that does not say whose they were.
    #[default]
    Daemon,
    /// A user of this node, by number; one who sends over the network, by address. For senders outside of any known pod.
    User(Arc<str>),
    /// All users of a namespace of Kubernetes.
    Namespace(Arc<str>),
}

impl Scope {
    /// The scope of the texts that labels and recordings have: a namespace, else a user.
    #[must_use]
    pub fn of(namespace: Option<&str>, user: Option<&str>) -> Self {
        match (namespace.filter(|text| !text.is_empty()), user.filter(|text| !text.is_empty())) {
            (Some(namespace), _) => Scope::Namespace(namespace.into()),
            (None, Some(user)) => Scope::User(user.into()),
            (None, None) => Scope::Daemon,
        }
    }

    /// The namespace, where it is known.
    #[must_use]
    pub fn namespace(&self) -> Option<&str> {
        if let Scope::Namespace(namespace) = self { Some(namespace) } else { None }
    }

    /// The user, where no namespace is known.
    #[must_use]
    pub fn user(&self) -> Option<&str> {
        if let Scope::User(user) = self { Some(user) } else { None }
    }
}
