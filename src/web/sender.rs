//! Finds the user of a TCP client on this node, from the kernel's own table of connections.
//!
//! Over loopback both ends of a connection are in one network namespace, so the kernel knows the client's socket too,
//! with its user. It is queried by netlink (`sock_diag(7)`), which any user may do. A client elsewhere has only an
//! address.
//!
//! The kernel is asked as soon as a connection is accepted, because it forgets the user when the client closes its end. All
//! loopback clients whose user is unknown count as one owner, whichever of the millions of loopback addresses they use.
//!
//! When all connection slots are taken, `slots` chooses the connection to evict by these owners.

use highwater_core::jobs::Sender;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, sendto, socket_with};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// From `linux/sock_diag.h`, `linux/netlink.h` and `linux/inet_diag.h`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
/// Offset of the user in an answer: after a netlink header (16 bytes), four bytes, the connection's ends (48 bytes),
/// and three numbers of four bytes.
const UID_AT: usize = 16 + 4 + 48 + 12;
/// How long to wait for the kernel, which answers at once.
const PATIENCE: Duration = Duration::from_millis(100);

/// Both ends of the connection of a request, and its client's user: an extension of every request.
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    /// The client's address.
    pub peer: SocketAddr,
    /// The address that it connected to.
    pub local: SocketAddr,
    /// The client's user, if the kernel reports it.
    user: Option<u32>,
}

impl Peer {
    /// The two ends of a connection that was just accepted. The kernel is queried, which takes it some ten microseconds.
    #[must_use]
    pub fn accepted(peer: SocketAddr, local: SocketAddr) -> Self {
        Self { peer, local, user: if is_here(peer.ip()) { uid_of(peer, local) } else { None } }
    }

    /// Whose the connection is.
    pub(super) fn client(&self) -> Client {
        match self.user {
            Some(user) => Client::User(user),
            None if is_here(self.peer.ip()) => Client::Unknown,
            None => Client::Network(network(self.peer.ip())),
        }
    }
}

/// Whose a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Client {
    /// A user of this node.
    User(u32),
    /// Someone on this node whose user the kernel does not report.
    Unknown,
    /// Someone in this network.
    Network(IpAddr),
}

/// The network of an address: the holder of an IPv6 address usually has 2⁶⁴ of them.
pub(super) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

/// The sender on this connection.
pub(super) fn sender(peer: &Peer) -> Sender {
    Sender { uid: peer.user, address: Some(peer.peer.ip().to_canonical()), ..Sender::default() }
}

fn is_here(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// The user of the socket at this end of a connection; `None` if the kernel does not report it.
fn uid_of(client: SocketAddr, server: SocketAddr) -> Option<u32> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(netlink::SOCK_DIAG)).ok()?;
    rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, Some(PATIENCE)).ok()?;
    let request = request(client, server)?;
    sendto(&socket, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0)).ok()?;
    let mut answer = [0; 512];
    let (length, _) = recv(&socket, &mut answer, RecvFlags::empty()).ok()?;
    parse(answer.get(..length)?)
}

/// A request for the socket at `client` that is connected to `server`.
fn request(client: SocketAddr, server: SocketAddr) -> Option<Vec<u8>> {
    let octets = |address: IpAddr| match address {
        IpAddr::V4(address) => [address.octets().as_slice(), &[0; 12]].concat(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let family = match (client.ip(), server.ip()) {
        (IpAddr::V4(_), IpAddr::V4(_)) => AF_INET,
        (IpAddr::V6(_), IpAddr::V6(_)) => AF_INET6,
        _ => return None,
    };
    let body = [
        &[family, IPPROTO_TCP, 0, 0][..],
        // Connections in any state.
        &u32::MAX.to_ne_bytes(),
        &client.port().to_be_bytes(),
        &server.port().to_be_bytes(),
        &octets(client.ip()),
        &octets(server.ip()),
        // On any interface, and with any cookie.
        &[0; 4],
        &[u8::MAX; 8],
    ]
    .concat();
    let length = u32::try_from(16 + body.len()).ok()?;
    let head =
        [&length.to_ne_bytes()[..], &SOCK_DIAG_BY_FAMILY.to_ne_bytes(), &NLM_F_REQUEST.to_ne_bytes(), &[0; 8]].concat();
    Some([head, body].concat())
}

/// The user in an answer; `None` for an error.
fn parse(answer: &[u8]) -> Option<u32> {
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    if kind != SOCK_DIAG_BY_FAMILY {
        return None;
    }
    let number = |at: usize| Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    // A client that has closed its end no longer has a file, and the kernel writes 0 for its user, which is not root.
    let has_file = number(UID_AT + 4)? != 0;
    number(UID_AT).filter(|_| has_file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    fn connected(address: &str) -> Option<(TcpStream, Peer)> {
        let listener = TcpListener::bind(address).ok()?;
        let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (accepted, peer) = listener.accept().expect("it connects");
        Some((client, Peer::accepted(peer, accepted.local_addr().expect("connected"))))
    }

    #[test]
    fn the_kernel_names_the_user_of_a_client_on_this_node() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            // A machine may have no IPv6.
            let Some((_client, peer)) = connected(address) else { continue };
            let sender = sender(&peer);
            assert_eq!(sender.uid, Some(rustix::process::geteuid().as_raw()), "{address}");
        }
    }

    #[test]
    fn a_client_that_has_closed_its_end_since_keeps_its_user() {
        let (client, peer) = connected("127.0.0.1:0").expect("loopback");
        drop(client);
        assert_eq!(sender(&peer).uid, Some(rustix::process::geteuid().as_raw()));
    }

    /// The kernel then reports 0, which looks like root.
    #[test]
    fn a_client_that_closed_its_end_before_it_was_accepted_has_no_user() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        drop(TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens"));
        let (accepted, peer) = listener.accept().expect("it connected");
        let peer = Peer::accepted(peer, accepted.local_addr().expect("connected"));
        assert_eq!(sender(&peer).uid, None);
    }

    #[test]
    fn a_connection_that_is_not_there_has_no_user() {
        let address = |text: &str| text.parse().expect("an address");
        assert_eq!(uid_of(address("127.0.0.1:1"), address("127.0.0.1:2")), None);
        let elsewhere = Peer::accepted(address("192.0.2.7:4000"), address("192.0.2.8:10450"));
        assert_eq!(elsewhere.client(), Client::Network("192.0.2.7".parse().expect("an address")));
        assert_eq!(sender(&elsewhere), Sender { address: Some(address("192.0.2.7:4000").ip()), ..Sender::default() });
        assert_eq!(parse(&[0; 200]), None);
        assert_eq!(parse(&[]), None);
    }
}
