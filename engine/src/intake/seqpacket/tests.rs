use super::*;
use highwater_core::clock::Manual;
use highwater_core::jobs::{Limits, Outcome};
use rustix::net::{AddressFamily, SocketAddrUnix, connect, socket};
use serde_json::{Value, json};

/// A listener in a folder of its own, whose rounds run when the test says so.
fn listener() -> (Listener, Intake, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let listener = Listener::beside(&folder.path().join("annotations.sock")).expect("bound");
    (listener, Intake::new(Limits::default(), Arc::new(Manual::at(0)), Arc::default()), folder)
}

fn sender(listener: &Listener) -> OwnedFd {
    let sender = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    connect(&sender, &SocketAddrUnix::new(listener.path()).expect("a short path")).expect("it listens");
    sender
}

/// Runs rounds until there is nothing to read.
fn rounds(reader: &mut Reader<'_>) {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        let mut events = Vec::with_capacity(EVENTS);
        let buffer = rustix::buffer::spare_capacity(&mut events);
        epoll::wait(&reader.listener.epoll, buffer, Some(&at_once)).expect("it can wait");
        if events.is_empty() {
            return;
        }
        reader.round(&events);
    }
}

fn say(sender: &OwnedFd, event: &Value) {
    send(sender, event.to_string().as_bytes(), SendFlags::DONTWAIT).expect("there is room");
}

fn mark(name: &str, asks: bool) -> Value {
    let mut mark = json!({"event": "mark", "name": name, "job": "j"});
    if asks {
        mark["answer"] = json!(true);
    }
    mark
}

/// The replies that wait.
fn replies(sender: &OwnedFd) -> Vec<Value> {
    let mut buffer = vec![0u8; 1 << 16];
    std::iter::from_fn(|| {
        let (length, _) = recv(sender, &mut *buffer, RecvFlags::DONTWAIT).ok()?;
        serde_json::from_slice(&buffer[..length]).ok()
    })
    .collect()
}

fn taken(intake: &Intake) -> u64 {
    intake.counts.get(Outcome::AcceptedWithoutGpu) + intake.counts.get(Outcome::Accepted)
}

#[test]
fn a_message_that_asks_gets_one_reply_and_others_get_none() {
    let (listener, intake, _folder) = listener();
    let (mut reader, sender) = (Reader::new(&listener, &intake), sender(&listener));
    say(&sender, &mark("a", false));
    rounds(&mut reader);
    assert_eq!(replies(&sender), [] as [Value; 0]);
    let lines = [mark("b", true), mark("", false), mark("c", true)].map(|event| event.to_string()).join("\n");
    send(&sender, lines.as_bytes(), SendFlags::DONTWAIT).expect("there is room");
    rounds(&mut reader);
    let replies = replies(&sender);
    assert_eq!((replies.len(), &replies[0]["accepted"], &replies[0]["refused"]), (1, &json!(2), &json!(1)));
    assert_eq!(replies[0]["reasons"], json!({"bad_name": 1}));
    assert_eq!(replies[0]["refusals"][0]["index"], json!(1));
}

#[test]
fn a_sender_that_never_reads_loses_its_replies_and_nothing_else() {
    let (listener, intake, _folder) = listener();
    let mut reader = Reader::new(&listener, &intake);
    let (deaf, other) = (sender(&listener), sender(&listener));
    let marks = 2_000;
    for n in 0..marks {
        say(&deaf, &mark("m", true));
        if n % 50 == 0 {
            rounds(&mut reader);
        }
    }
    say(&other, &mark("n", true));
    rounds(&mut reader);
    assert_eq!(taken(&intake), marks + 1);
    assert_eq!(replies(&other).len(), 1);
    let kept = replies(&deaf);
    let bytes: usize = kept.iter().map(|reply| reply.to_string().len()).sum();
    assert!(!kept.is_empty() && bytes <= 2 * REPLIES, "{bytes} bytes of {} replies", kept.len());
    // It reads again.
    say(&deaf, &mark("m", true));
    rounds(&mut reader);
    assert_eq!(replies(&deaf).len(), 1);
}

#[test]
fn a_sender_that_closes_without_reading_loses_no_message() {
    let (listener, intake, _folder) = listener();
    let (mut reader, sender) = (Reader::new(&listener, &intake), sender(&listener));
    say(&sender, &mark("a", true));
    rounds(&mut reader);
    say(&sender, &mark("b", true));
    say(&sender, &mark("c", false));
    drop(sender);
    rounds(&mut reader);
    assert_eq!((taken(&intake), reader.connections.len()), (3, 0));
}

/// A connection may outlive its process, whose id the kernel gives to another one, perhaps of another user or pod.
#[test]
fn a_process_with_the_id_of_the_sender_that_ended_is_not_the_sender() {
    let (listener, intake, _folder) = listener();
    let (mut reader, sender) = (Reader::new(&listener, &intake), sender(&listener));
    let unnamed = json!({"event": "mark", "name": "m"});
    let mut say_with = |accepted: &dyn Fn(u64) -> u64, is_due: bool| {
        rounds(&mut reader);
        for connection in reader.connections.values_mut() {
            connection.accepted.0 = accepted(connection.accepted.0);
            connection.accepted.1 -= if is_due { CHECK } else { Duration::ZERO };
        }
        say(&sender, &unnamed);
        rounds(&mut reader);
        reader.connections.values().map(|connection| connection.sender.pid).collect::<Vec<_>>()
    };
    let own = Some(std::process::id());
    assert_eq!(say_with(&|accepted| accepted, true), [own], "it still runs");
    assert_eq!(say_with(&|_| 1, false), [own], "not looked at yet");
    assert_eq!(say_with(&|_| 1, true), [None], "a process that started after the connection was accepted");
    assert_eq!(say_with(&|_| 1, true), [None]);
}
