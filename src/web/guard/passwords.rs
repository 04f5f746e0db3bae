//! Users and their passwords: `basic_auth_users`.
//!
//! A check is slow on purpose, 50 to 1000 ms of a core. So one at a time runs, on a thread that no request waits on, few wait
//! for it, and fewer of one address, so that a flood of wrong passwords costs one core at HTTP's low priority and nobody else's
//! first request. What was right is remembered under a keyed hash: a scraper is checked once.

use ring::hmac;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Semaphore;

/// Checks that wait at a time, and of one address.
const MOST_WAITING: usize = 16;
const MOST_OF_ADDRESS: usize = 4;

/// What became of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Right,
    Wrong,
    /// Too many checks wait.
    Busy,
}

/// All users.
pub(super) struct Passwords {
    users: BTreeMap<String, String>,
    /// The hash that takes longest, checked for users who do not exist: they cannot be told by the time.
    decoy: String,
    key: hmac::Key,
    /// The tag of the password that was right, of each user at most one.
    right: Mutex<HashMap<String, hmac::Tag>>,
    one_at_a_time: Arc<Semaphore>,
    waiting: Mutex<HashMap<IpAddr, usize>>,
}

impl Passwords {
    /// Those users; `None` where there are none.
    ///
    /// # Errors
    /// Where the system gives no random key.
    pub(super) fn new(users: BTreeMap<String, String>) -> Result<Option<Self>, String> {
        let cost = |hash: &&String| hash.parse::<bcrypt::HashParts>().map_or(0, |parts| parts.get_cost());
        let Some(decoy) = users.values().max_by_key(cost).cloned() else { return Ok(None) };
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &ring::rand::SystemRandom::new());
        let key = key.map_err(|_| "the system gives no random bytes".to_owned())?;
        let one_at_a_time = Arc::new(Semaphore::new(1));
        Ok(Some(Self { users, decoy, key, right: Mutex::default(), one_at_a_time, waiting: Mutex::default() }))
    }

    pub(super) fn has_users(&self, users: &BTreeMap<String, String>) -> bool {
        self.users == *users
    }

    /// Checks what somebody at `address` gave.
    pub(super) async fn check(&self, user: &str, password: &[u8], address: IpAddr) -> Verdict {
        let told = [&(user.len() as u64).to_be_bytes(), user.as_bytes(), password].concat();
        if self.is_known(user, &told) {
            return Verdict::Right;
        }
        let Some(_waiting) = Waiting::begin(&self.waiting, network(address)) else { return Verdict::Busy };
        let Ok(turn) = Arc::clone(&self.one_at_a_time).acquire_owned().await else { return Verdict::Busy };
        // It may have been found right while this one waited.
        if self.is_known(user, &told) {
            return Verdict::Right;
        }
        let (hash, password) = (self.users.get(user).unwrap_or(&self.decoy).clone(), password.to_vec());
        let checked = tokio::task::spawn_blocking(move || {
            // Held until the check is over, also where nobody waits for it any more.
            let _turn = turn;
            bcrypt::verify(password, &hash).unwrap_or(false)
        });
        if !checked.await.unwrap_or(false) || !self.users.contains_key(user) {
            return Verdict::Wrong;
        }
        let tag = hmac::sign(&self.key, &told);
        self.right.lock().unwrap_or_else(PoisonError::into_inner).insert(user.to_owned(), tag);
        Verdict::Right
    }

    fn is_known(&self, user: &str, told: &[u8]) -> bool {
        let right = self.right.lock().unwrap_or_else(PoisonError::into_inner);
        right.get(user).is_some_and(|tag| hmac::verify(&self.key, told, tag.as_ref()).is_ok())
    }
}

/// Whom an address belongs to: one who has an IPv6 address has 2⁶⁴ of them.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

/// One check that waits or runs.
struct Waiting<'a> {
    all: &'a Mutex<HashMap<IpAddr, usize>>,
    address: IpAddr,
}

impl<'a> Waiting<'a> {
    fn begin(all: &'a Mutex<HashMap<IpAddr, usize>>, address: IpAddr) -> Option<Self> {
        let mut waiting = all.lock().unwrap_or_else(PoisonError::into_inner);
        let of_address = waiting.get(&address).copied().unwrap_or(0);
        if of_address >= MOST_OF_ADDRESS || waiting.values().sum::<usize>() >= MOST_WAITING {
            return None;
        }
        waiting.insert(address, of_address + 1);
        Some(Self { all, address })
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut waiting = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        match waiting.get_mut(&self.address) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                waiting.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const THERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

    fn passwords() -> Passwords {
        let hash = |password: &str, salt| bcrypt::hash_with_salt(password, 4, [salt; 16]).expect("a hash").to_string();
        let users = [("alice", hash("wonder", 1)), ("bob", hash("builder", 2))];
        let users = users.into_iter().map(|(user, hash)| (user.to_owned(), hash)).collect();
        Passwords::new(users).expect("random bytes").expect("users")
    }

    #[tokio::test]
    async fn the_right_password_is_right_and_is_checked_once() {
        let passwords = passwords();
        assert_eq!(passwords.check("alice", b"builder", HERE).await, Verdict::Wrong);
        assert_eq!(passwords.check("carol", b"wonder", HERE).await, Verdict::Wrong);
        // The password of the decoy is nobody's.
        for password in ["wonder", "builder"] {
            assert_eq!(passwords.check("", password.as_bytes(), HERE).await, Verdict::Wrong);
        }
        assert_eq!(passwords.check("alice", b"wonder", HERE).await, Verdict::Right);
        // Nobody can check any more, and it is known all the same; a wrong one is not.
        passwords.one_at_a_time.close();
        assert_eq!(passwords.check("alice", b"wonder", HERE).await, Verdict::Right);
        assert_eq!(passwords.check("alice", b"wonde", HERE).await, Verdict::Busy);
        assert_eq!(passwords.check("alicew", b"onder", HERE).await, Verdict::Busy);
        assert_eq!(passwords.check("bob", b"wonder", HERE).await, Verdict::Busy);
    }

    #[tokio::test]
    async fn who_guesses_keeps_nobody_else_waiting() {
        let passwords = Arc::new(passwords());
        let turn = passwords.one_at_a_time.acquire().await.expect("it is open");
        let check = |user: &'static str, address| {
            let passwords = Arc::clone(&passwords);
            tokio::spawn(async move { passwords.check(user, b"builder", address).await })
        };
        let guesses: Vec<_> = (0..100).map(|_| check("alice", HERE)).collect();
        while passwords.waiting.lock().expect("held by nobody").get(&HERE) != Some(&MOST_OF_ADDRESS) {
            tokio::task::yield_now().await;
        }
        let honest = check("bob", THERE);
        while !passwords.waiting.lock().expect("held by nobody").contains_key(&THERE) {
            tokio::task::yield_now().await;
        }
        drop(turn);
        assert_eq!(honest.await.expect("checked"), Verdict::Right);
        let mut busy = 0;
        for guess in guesses {
            busy += usize::from(guess.await.expect("checked") == Verdict::Busy);
        }
        assert_eq!(busy, 100 - MOST_OF_ADDRESS);
        assert!(passwords.waiting.lock().expect("held by nobody").is_empty());
    }

    #[test]
    fn an_address_of_ipv6_stands_for_its_network() {
        let network_of = |text: &str| network(text.parse().expect("an address")).to_string();
        assert_eq!(network_of("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(network_of("::ffff:10.0.0.1"), "10.0.0.1");
    }
}
