//! Which captures are removed when there are too many. No one can push out another's evidence, by requesting captures, by
//! marking, or by what is found of invented jobs. Pure.
//!
//! Captures are of three classes. Requested captures take at most half of all, and push out only each other. Captures
//! of `oom` and `host_oom`, which any job can mark, push out requested ones, then each other. Captures of findings push out
//! requested ones, then those of marks, then each other. Within the class of marks, the oldest capture of the owner with the
//! most goes first. Within the class of findings, the oldest capture of the owner with the most goes first, among those of
//! that owner's most frequent kind of finding. A later class leaves each earlier one an eighth of the room. If
//! `captures.most_files` is below four, no file is kept for a class, and a capture of marks may push out one of
//! findings.

use super::directory::Listed;
use super::settings::CaptureSettings;
use highwater_core::shares::largest;
use highwater_engine::recording::State;

/// What a capture is for. A later class pushes out earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    /// It was requested.
    Asked,
    /// A job marked `oom` or `host_oom`.
    Oom,
    /// A finding was raised.
    Finding,
}

impl Class {
    /// The class of a capture for these reasons, given by their labels.
    pub fn of<'a>(reasons: impl IntoIterator<Item = &'a str>) -> Self {
        let class = |reason: &str| match reason {
            "asked" => Class::Asked,
            "oom" | "host_oom" => Class::Oom,
            _ => Class::Finding,
        };
        reasons.into_iter().map(class).max().unwrap_or(Class::Finding)
    }
}

impl Listed {
    fn class(&self) -> Class {
        Class::of(self.reasons.iter().map(String::as_str))
    }
}

/// A number of files and of bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Amount {
    files: usize,
    bytes: u64,
}

impl Amount {
    fn exceeds(self, most: Self) -> bool {
        self.files > most.files || self.bytes > most.bytes
    }

    fn plus(self, other: Self) -> Self {
        Self { files: self.files + other.files, bytes: self.bytes + other.bytes }
    }

    fn less(self, other: Self) -> Self {
        Self { files: self.files.saturating_sub(other.files), bytes: self.bytes.saturating_sub(other.bytes) }
    }
}

/// All captures, and their bounds.
pub(super) struct Shares<'a> {
    kept: Vec<&'a Listed>,
    /// The capture being written. It is never removed, and room is made for it.
    newcomer: Option<&'a Listed>,
    most: Amount,
    most_asked: Amount,
    /// What each class keeps.
    floor: Amount,
    most_capture_bytes: u64,
}

impl<'a> Shares<'a> {
    /// `other_bytes` are the bytes in the folder that no finished capture takes.
    pub fn new(listed: impl Iterator<Item = &'a Listed>, settings: &CaptureSettings, other_bytes: u64) -> Self {
        let (writing, kept): (Vec<_>, Vec<_>) = listed.partition(|listed| listed.state == State::Writing);
        let newcomer = writing.first().copied();
        let reserved = other_bytes.saturating_sub(newcomer.map_or(0, |listed| listed.bytes));
        let (files, bytes) = (settings.most_files, settings.most_bytes);
        // With fewer than four files, none is set apart.
        let floor = if files < 4 { 0 } else { (files / 8).max(1) };
        Self {
            kept,
            newcomer,
            most: Amount { files, bytes: bytes.saturating_sub(reserved) },
            most_asked: Amount { files: (files / 2).max(1), bytes: bytes / 2 },
            floor: Amount { files: floor, bytes: bytes / 8 },
            most_capture_bytes: settings.most_capture_bytes(),
        }
    }

    /// The captures to remove so that the rest keeps to its bounds, in order.
    pub fn removals(mut self) -> Vec<String> {
        let mut remove = Vec::new();
        while let Some(victim) = self.victim() {
            remove.push(self.kept.remove(victim).id.clone());
        }
        remove
    }

    /// Bytes that the file of a capture of this class may take, so that it and its journal fit without pushing out what
    /// it must not; `None` if there is no room.
    pub fn room(&self, class: Class) -> Option<u64> {
        let above = [Class::Oom, Class::Finding].into_iter().filter(|other| *other > class);
        let above = above.map(|other| self.amount(other)).fold(Amount::default(), Amount::plus);
        let room = match class {
            Class::Asked => self.most.less(above).bytes.min(self.most_asked.bytes),
            Class::Oom => self.most.less(above).less(self.floor).bytes,
            Class::Finding => self.most.less(self.floor).less(self.floor).bytes,
        };
        // With few files, none is set apart for requested captures, which then have to wait for room.
        let has_place = class != Class::Asked || above.files < self.most.files;
        (has_place && room > 0).then(|| self.most_capture_bytes.min(room / 2))
    }

    fn amount(&self, class: Class) -> Amount {
        let of_class = self.kept.iter().copied().chain(self.newcomer).filter(|listed| listed.class() == class);
        of_class.fold(Amount::default(), |sum, listed| sum.plus(Amount { files: 1, bytes: listed.bytes }))
    }

    /// The next capture to remove.
    fn victim(&self) -> Option<usize> {
        let (asked, oom, finding) = (self.amount(Class::Asked), self.amount(Class::Oom), self.amount(Class::Finding));
        if asked.exceeds(self.most_asked)
            && let Some(oldest) = self.oldest(Class::Asked)
        {
            return Some(oldest);
        }
        let by_itself = oom.plus(finding);
        let is_over = by_itself.plus(asked).exceeds(self.most);
        let squeezes_asked = by_itself.exceeds(self.most.less(self.floor));
        let squeezes_oom = finding.exceeds(self.most.less(self.floor).less(self.floor));
        let asked_goes = || self.oldest(Class::Asked).filter(|_| is_over && asked.exceeds(self.floor));
        match self.newcomer.map_or(Class::Finding, Listed::class) {
            Class::Asked => self.oldest(Class::Asked).filter(|_| is_over),
            Class::Oom if is_over || squeezes_asked => {
                let few = || self.of_largest_kind().filter(|_| self.floor.files == 0 && is_over);
                asked_goes().or_else(|| self.of_largest_owner()).or_else(few)
            }
            Class::Finding if is_over || squeezes_asked || squeezes_oom => {
                let oom_goes = || self.of_largest_owner().filter(|_| oom.exceeds(self.floor));
                let any = || self.of_largest_owner().or_else(|| self.oldest(Class::Asked)).filter(|_| is_over);
                asked_goes().or_else(oom_goes).or_else(|| self.of_largest_kind()).or_else(any)
            }
            Class::Oom | Class::Finding => None,
        }
    }

    fn oldest(&self, class: Class) -> Option<usize> {
        self.kept.iter().position(|listed| listed.class() == class)
    }

    /// The captures of the owner with the most captures of a class; only those of no other owner, if there are any.
    fn of_most(&self, class: Class) -> Vec<(usize, &Listed)> {
        let of_class = || self.kept.iter().copied().enumerate().filter(move |(_, listed)| listed.class() == class);
        let Some((largest, _)) = largest(of_class().flat_map(|(_, listed)| &listed.owners)) else {
            return of_class().collect();
        };
        let alone = of_class().filter(|(_, listed)| listed.owners.iter().all(|owner| owner == largest));
        let alone: Vec<_> = alone.collect();
        if alone.is_empty() {
            return of_class().filter(|(_, listed)| listed.owners.iter().any(|owner| owner == largest)).collect();
        }
        alone
    }

    /// The oldest capture of marks, of the owner with the most of them.
    fn of_largest_owner(&self) -> Option<usize> {
        self.of_most(Class::Oom).first().map(|(at, _)| *at)
    }

    /// The oldest capture of the most frequent kind of finding, among the captures of the owner with the most. So a kind that
    /// recurs pushes out no other kind.
    fn of_largest_kind(&self) -> Option<usize> {
        let of_owner = self.of_most(Class::Finding);
        let finding = || of_owner.iter();
        let count = |reason: &str| finding().filter(|(_, listed)| listed.reason == reason).count();
        // Among kinds of the same size the first, which is the oldest.
        let largest = finding().rev().max_by_key(|(_, listed)| count(&listed.reason))?.1.reason.as_str();
        finding().find(|(_, listed)| listed.reason == largest).map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// A folder in which captures are taken one after the other, each of a given number of bytes.
    #[derive(Default)]
    struct Shelf {
        listed: BTreeMap<String, Listed>,
        settings: CaptureSettings,
        taken: usize,
    }

    impl Shelf {
        fn of(most_files: usize, most_bytes: u64) -> Self {
            let settings = CaptureSettings { most_files, most_bytes, ..CaptureSettings::default() };
            Self { settings, ..Self::default() }
        }

        fn take(&mut self, reason: &str, bytes: u64) -> bool {
            self.take_of("", reason, bytes)
        }

        fn take_of(&mut self, owner: &str, reason: &str, bytes: u64) -> bool {
            let shares = |this: &Self, other| Shares::new(this.listed.values(), &this.settings, other).removals();
            let class = Class::of([reason]);
            let room = Shares::new(self.listed.values(), &self.settings, 0).room(class);
            if room.is_none_or(|room| room < bytes) {
                return false;
            }
            let id = format!("{:06}-{reason}-{owner}", self.taken);
            self.taken += 1;
            let (reason, note) = (reason.to_owned(), String::new());
            let (begin_unix_nano, end_unix_nano, trouble) = (None, None, None);
            let (reasons, state) = (vec![reason.clone()], State::Writing);
            let owners = vec![owner.to_owned()];
            let listed =
                Listed { id, reason, reasons, owners, note, begin_unix_nano, end_unix_nano, bytes, state, trouble };
            let id = listed.id.clone();
            self.listed.insert(id.clone(), listed);
            for removed in shares(self, bytes) {
                self.listed.remove(&removed);
            }
            self.listed.get_mut(&id).expect("never the one that is written").state = State::Complete;
            assert!(self.listed.len() <= self.settings.most_files, "{:?}", self.listed.keys());
            assert!(self.listed.values().map(|listed| listed.bytes).sum::<u64>() <= self.settings.most_bytes);
            true
        }

        fn count(&self, reason: &str) -> usize {
            self.listed.values().filter(|listed| listed.reason == reason).count()
        }
    }

    #[test]
    fn asking_pushes_out_only_what_was_asked_for() {
        let mut shelf = Shelf::of(20, 256 << 20);
        for reason in ["xid", "low_headroom", "straggler", "oom", "gpu_lost"].repeat(3) {
            assert!(shelf.take(reason, 1 << 20));
        }
        for _ in 0..22 {
            assert!(shelf.take("asked", 1 << 20));
        }
        assert_eq!((shelf.count("oom"), shelf.count("xid"), shelf.listed.len()), (3, 3, 20));
        for bytes in 0..200 {
            shelf.take("asked", bytes << 20);
        }
        assert_eq!((shelf.count("oom"), shelf.count("xid"), shelf.count("asked") > 0), (3, 3, true));
        for _ in 0..40 {
            shelf.take("host_oom", 1 << 20);
        }
        assert_eq!(shelf.count("xid"), 3, "any job can mark that it has run out of memory");
    }

    #[test]
    fn marks_push_out_no_finding_and_a_kind_that_comes_again_no_other() {
        let mut shelf = Shelf::of(20, 256 << 20);
        assert!(shelf.take("asked", 1 << 20) && shelf.take("xid", 1 << 20) && shelf.take("gpu_lost", 1 << 20));
        for _ in 0..100 {
            shelf.take("straggler", 1 << 20);
        }
        assert_eq!(["asked", "xid", "gpu_lost", "straggler"].map(|reason| shelf.count(reason)), [1, 1, 1, 14]);
        for _ in 0..100 {
            assert!(shelf.take("oom", 1 << 20), "it always finds room");
        }
        assert_eq!(["asked", "xid", "straggler", "oom"].map(|reason| shelf.count(reason)), [1, 1, 14, 2]);
        let mut shelf = Shelf::of(20, 256 << 20);
        for _ in 0..100 {
            shelf.take("oom", 20 << 20);
        }
        for _ in 0..20 {
            assert!(shelf.take("low_headroom", 20 << 20));
        }
        assert!(shelf.count("low_headroom") > 5 && shelf.count("oom") > 0, "{:?}", shelf.listed.keys());
    }

    #[test]
    fn what_is_found_of_one_owner_pushes_out_nothing_of_another_within_its_share() {
        let mut shelf = Shelf::of(20, 256 << 20);
        for reason in ["allocator_thrash", "low_headroom", "comm_starvation"] {
            assert!(shelf.take_of("user 1", reason, 1 << 20));
        }
        assert!(shelf.take("gpu_lost", 1 << 20) && shelf.take_of("user 1", "oom", 1 << 20));
        for _ in 0..30 {
            for reason in ["allocator_thrash", "low_headroom", "straggler", "memory_growth", "oom"] {
                assert!(shelf.take_of("user 666", reason, 1 << 20));
            }
        }
        let of_one = shelf.listed.values().filter(|listed| listed.owners == ["user 1"]).count();
        assert_eq!(
            (of_one, shelf.count("gpu_lost"), shelf.listed.len() > 15),
            (4, 1, true),
            "{:?}",
            shelf.listed.keys()
        );
        // Two who have very many share all of it.
        for _ in 0..40 {
            assert!(shelf.take_of("user 667", "straggler", 1 << 20));
        }
        let of = |owner: &str| shelf.listed.keys().filter(|id| id.ends_with(owner)).count();
        assert_eq!(
            (of("user 1"), of("user 666") > 4, of("user 667") > 4),
            (4, true, true),
            "{:?}",
            shelf.listed.keys()
        );
    }

    #[test]
    fn findings_find_room_whatever_was_asked_for_and_the_oldest_goes_first() {
        let mut shelf = Shelf::of(8, 80);
        for _ in 0..20 {
            shelf.take("asked", 5);
        }
        assert_eq!(shelf.count("asked"), 4, "half");
        for _ in 0..20 {
            assert!(shelf.take("xid", 5));
        }
        assert_eq!((shelf.count("asked"), shelf.count("xid")), (1, 6), "and one place for marks");
        assert!(shelf.listed.keys().all(|id| id.as_str() >= "000019"), "{:?}", shelf.listed.keys());
    }

    #[test]
    fn of_few_places_none_is_set_apart() {
        for most in 1..4 {
            let mut shelf = Shelf::of(most, 4 << 20);
            for _ in 0..5 {
                assert!(shelf.take("xid", 1 << 10));
            }
            assert_eq!(shelf.count("xid"), most);
            assert!(!shelf.take("asked", 1 << 10), "what is asked for has to wait");
            assert!(shelf.take("oom", 1 << 10) && shelf.take("xid", 1 << 10));
        }
    }
}
