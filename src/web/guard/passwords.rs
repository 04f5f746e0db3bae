//! Users and their passwords: `basic_auth_users`.
//!
//! A check is slow on purpose: it takes 50 to 1000 ms of a core. Only one check runs at a time, on a thread that blocks
//! no request; few may wait for it, and fewer per address. So a flood of wrong passwords costs one core at HTTP's low
//! priority, and does not block other clients' first requests. A password found right is remembered under a keyed hash:
//! a scraper is checked once.

use super::super::sender::network;
use ring::hmac;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Semaphore;

/// Limits on the checks that wait at a time, in total and per address.
const MOST_WAITING: usize = 16;
const MOST_OF_ADDRESS: usize = 4;

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Right,
    Wrong,
    /// Too many checks are waiting.
    Busy,
}

/// All users.
pub(super) struct Passwords {
    users: BTreeMap<String, String>,
    /// The slowest hash, checked for users who do not exist, so that timing does not reveal which users exist.
    decoy: String,
    key: hmac::Key,
    /// The tag of each user's correct password, at most one per user.
    right: Mutex<HashMap<String, hmac::Tag>>,
    one_at_a_time: Arc<Semaphore>,
    waiting: Mutex<HashMap<IpAddr, usize>>,
}

impl Passwords {
    /// These users; `None` if there are none.
    ///
    /// # Errors
    /// The system cannot generate a random key.
    pub(super) fn new(users: BTreeMap<String, String>) -> Result<Option<Self>, String> {
        let cost = |hash: &&String| hash.parse::<bcrypt::HashParts>().map_or(0, |parts| parts.get_cost());
        let Some(decoy) = users.values().max_by_key(cost).cloned() else { return Ok(None) };
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &ring::rand::SystemRandom::new());
        let key = key.map_err(|_| "the system provides no random bytes".to_owned())?;
        let one_at_a_time = Arc::new(Semaphore::new(1));
        Ok(Some(Self { users, decoy, key, right: Mutex::default(), one_at_a_time, waiting: Mutex::default() }))
    }

    pub(super) fn has_users(&self, users: &BTreeMap<String, String>) -> bool {
        self.users == *users
    }

    /// Checks the credentials sent from `address`.
    pub(super) async fn check(&self, user: &str, password: &[u8], address: IpAddr) -> Verdict {
        let credentials = [&(user.len() as u64).to_be_bytes(), user.as_bytes(), password].concat();
        if self.is_known(user, &credentials) {
            return Verdict::Right;
        }
        let Some(_waiting) = Waiting::begin(&self.waiting, network(address)) else { return Verdict::Busy };
        let Ok(turn) = Arc::clone(&self.one_at_a_time).acquire_owned().await else { return Verdict::Busy };
        // Another check may have confirmed it while this one waited.
        if self.is_known(user, &credentials) {
            return Verdict::Right;
        }
        let (hash, password) = (self.users.get(user).unwrap_or(&self.decoy).clone(), password.to_vec());
        let checked = tokio::task::spawn_blocking(move || {
            // Held until the check is over, even if its request has been dropped.
            let _turn = turn;
            bcrypt::verify(password, &hash).unwrap_or(false)
        });
        if !checked.await.unwrap_or(false) || !self.users.contains_key(user) {
            return Verdict::Wrong;
        }
        let tag = hmac::sign(&self.key, &credentials);
        self.right.lock().unwrap_or_else(PoisonError::into_inner).insert(user.to_owned(), tag);
        Verdict::Right
    }

    fn is_known(&self, user: &str, credentials: &[u8]) -> bool {
        let right = self.right.lock().unwrap_or_else(PoisonError::into_inner);
        right.get(user).is_some_and(|tag| hmac::verify(&self.key, credentials, tag.as_ref()).is_ok())
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
        // The decoy's password belongs to no user.
        for password in ["wonder", "builder"] {
            assert_eq!(passwords.check("", password.as_bytes(), HERE).await, Verdict::Wrong);
        }
        assert_eq!(passwords.check("alice", b"wonder", HERE).await, Verdict::Right);
        // No check can run any more; a known password still passes, a wrong one does not.
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
        while passwords.waiting.lock().expect("not poisoned").get(&HERE) != Some(&MOST_OF_ADDRESS) {
            tokio::task::yield_now().await;
        }
        let honest = check("bob", THERE);
        while !passwords.waiting.lock().expect("not poisoned").contains_key(&THERE) {
            tokio::task::yield_now().await;
        }
        drop(turn);
        assert_eq!(honest.await.expect("checked"), Verdict::Right);
        let mut busy = 0;
        for guess in guesses {
            busy += usize::from(guess.await.expect("checked") == Verdict::Busy);
        }
        assert_eq!(busy, 100 - MOST_OF_ADDRESS);
        assert!(passwords.waiting.lock().expect("not poisoned").is_empty());
    }

    #[test]
    fn an_address_of_ipv6_stands_for_its_network() {
        let network_of = |text: &str| network(text.parse().expect("an address")).to_string();
        assert_eq!(network_of("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(network_of("::ffff:10.0.0.1"), "10.0.0.1");
    }
}
