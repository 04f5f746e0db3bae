//! Where a rank stands in its job: its coordinates in the grid of parallel dimensions.
//!
//! Enters: names of axes with whole numbers, as a job sends them. Leaves: a [`Mesh`], small and checked, and whether two ranks do
//! the same work by their meshes. Invariant: ranks that differ along an axis that is not known as a data axis are not alike.

use std::collections::BTreeMap;

/// Axes of one rank.
const MOST_AXES: usize = 12;
/// Bytes of an axis' name.
const MOST_NAME_BYTES: usize = 24;
/// Axes along which ranks run the same layers on other data, beside those whose names begin with `dp`.
const DATA_AXES: [&str; 7] = ["data", "ddp", "edp", "fsdp", "hsdp", "replicate", "shard"];
/// Axes along which the layers of a model are divided.
const STAGE_AXES: [&str; 4] = ["pp", "pipe", "pipeline", "stage"];

/// Why what a job sent is not a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadMesh {
    /// It has no axis, or too many.
    #[error("has {0} axes, 1 to {MOST_AXES} are allowed")]
    Axes(usize),
    /// The name of an axis is empty, too long, or has other characters than `a` to `z`, digits and `_`.
    #[error("an axis name must have 1 to {MOST_NAME_BYTES} characters of a to z, 0 to 9 and _")]
    Name,
}

/// The coordinates of one rank, by axis.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mesh(Box<[(Box<str>, u32)]>);

impl Mesh {
    /// Checks what a job sent.
    ///
    /// # Errors
    /// The number of axes, or a name.
    pub fn checked(axes: BTreeMap<String, u32>) -> Result<Self, BadMesh> {
        if axes.is_empty() || axes.len() > MOST_AXES {
            return Err(BadMesh::Axes(axes.len()));
        }
        let is_good = |name: &String| {
            let usual = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
            (1..=MOST_NAME_BYTES).contains(&name.len()) && name.bytes().all(usual)
        };
        if !axes.keys().all(is_good) {
            return Err(BadMesh::Name);
        }
        Ok(Self(axes.into_iter().map(|(name, at)| (name.into_boxed_str(), at)).collect()))
    }

    /// The axes with their coordinates, in the order of their names.
    pub fn axes(&self) -> impl Iterator<Item = (&str, u32)> {
        self.0.iter().map(|(name, at)| (&**name, *at))
    }

    /// The pipeline stage; `None` where the model is not divided into stages.
    #[must_use]
    pub fn stage(&self) -> Option<u32> {
        self.axes().find(|(name, _)| STAGE_AXES.contains(name)).map(|(_, at)| at)
    }

    /// Whether two ranks run the same layers and the same shard of them, on other data.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        self.has_same_axes(other) && self.differs_only(other, is_data_axis)
    }

    /// Whether two ranks work on the same data.
    #[must_use]
    pub fn shares_data_with(&self, other: &Self) -> bool {
        self.has_same_axes(other) && self.differs_only(other, |name| !is_data_axis(name))
    }

    fn has_same_axes(&self, other: &Self) -> bool {
        self.axes().map(|(name, _)| name).eq(other.axes().map(|(name, _)| name))
    }

    fn differs_only(&self, other: &Self, along: impl Fn(&str) -> bool) -> bool {
        self.axes().zip(other.axes()).all(|((name, one), (_, another))| one == another || along(name))
    }
}

fn is_data_axis(name: &str) -> bool {
    name.starts_with("dp") || DATA_AXES.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(axes: &[(&str, u32)]) -> Mesh {
        Mesh::checked(axes.iter().map(|(name, at)| ((*name).to_owned(), *at)).collect()).expect("good")
    }

    #[test]
    fn ranks_are_alike_if_they_differ_along_data_axes_only() {
        let of = |dp, pp, tp| mesh(&[("dp", dp), ("pp", pp), ("tp", tp)]);
        assert!(of(0, 1, 2).is_like(&of(3, 1, 2)) && of(0, 1, 2).is_like(&of(0, 1, 2)));
        assert!(!of(0, 1, 2).is_like(&of(0, 2, 2)) && !of(0, 1, 2).is_like(&of(1, 1, 3)));
        assert!(!mesh(&[("dp", 0)]).is_like(&mesh(&[("dp", 1), ("tp", 0)])), "another set of axes");
        assert!(!mesh(&[("spatial", 0)]).is_like(&mesh(&[("spatial", 1)])), "an axis that nobody knows");
        for axis in ["dp_replicate", "dp_shard", "fsdp", "replicate", "shard", "ddp"] {
            assert!(mesh(&[(axis, 0)]).is_like(&mesh(&[(axis, 1)])), "{axis}");
        }
        for axis in ["tp", "cp", "ep", "pp"] {
            assert!(!mesh(&[(axis, 0)]).is_like(&mesh(&[(axis, 1)])), "{axis}");
        }
    }

    #[test]
    fn ranks_share_data_if_they_differ_in_stage_or_shard_only() {
        let of = |dp, pp| mesh(&[("dp", dp), ("pp", pp)]);
        assert!(of(1, 0).shares_data_with(&of(1, 3)) && !of(1, 0).shares_data_with(&of(0, 0)));
        assert_eq!((of(1, 3).stage(), mesh(&[("tp", 1)]).stage()), (Some(3), None));
        assert_eq!(of(1, 3).axes().collect::<Vec<_>>(), [("dp", 1), ("pp", 3)]);
    }

    #[test]
    fn axes_are_bounded_in_number_and_name() {
        let checked = |names: &[String]| Mesh::checked(names.iter().map(|name| (name.clone(), 0)).collect());
        let many = |count: usize| (0..count).map(|n| format!("a{n}")).collect::<Vec<_>>();
        assert!(checked(&many(12)).is_ok() && checked(&["a".repeat(24)]).is_ok());
        assert_eq!((checked(&many(13)), checked(&[])), (Err(BadMesh::Axes(13)), Err(BadMesh::Axes(0))));
        for name in ["", "PP", "p p", "ü", &"a".repeat(25)] {
            assert_eq!(checked(&[name.to_owned()]), Err(BadMesh::Name), "{name}");
        }
        assert_eq!(BadMesh::Axes(0).to_string(), "has 0 axes, 1 to 12 are allowed");
    }
}
