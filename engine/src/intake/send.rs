//! Sends the annotations of simulated or recorded jobs, each at its time, over the real socket or directly.

use crate::intake::Intake;
use highwater_core::clock::{Clock, MILLISECOND_NS};
use highwater_core::jobs::Sender;
use highwater_core::source::Source;
use highwater_core::wire::Annotation;
use std::io;
use std::iter::Peekable;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Sends the source's annotations at their times, until `stop` or until there are no more. Without a socket they go to
/// the intake directly.
pub fn send_annotations(
    source: &dyn Source,
    clock: &dyn Clock,
    socket: Option<&Path>,
    intake: &Intake,
    stop: &AtomicBool,
) {
    let mut sender = AnnotationSender { socket: socket.and_then(connect), intake, complained: false };
    for annotation in source.annotations() {
        let at_ns = annotation.time_unix_nano.unwrap_or_else(|| clock.now_ns());
        while clock.now_ns() < at_ns {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            clock.sleep_until(at_ns.min(clock.now_ns() + 100 * MILLISECOND_NS));
        }
        if stop.load(Ordering::Relaxed) {
            return;
        }
        sender.send(annotation);
    }
}

/// Removes the annotations that are due at a moment, in order of time; one without a time is due at once.
pub fn due<Annotations: Iterator<Item = Annotation>>(
    annotations: &mut Peekable<Annotations>,
    at_ns: i64,
) -> impl Iterator<Item = Annotation> + use<'_, Annotations> {
    std::iter::from_fn(move || annotations.next_if(|next| next.time_unix_nano.is_none_or(|time_ns| time_ns <= at_ns)))
}

fn connect(path: &Path) -> Option<UnixDatagram> {
    let connected = UnixDatagram::unbound().and_then(|socket| socket.connect(path).map(|()| socket));
    connected.inspect_err(|error| tracing::error!(%error, "simulated jobs cannot reach the annotation socket")).ok()
}

struct AnnotationSender<'a> {
    socket: Option<UnixDatagram>,
    intake: &'a Intake,
    complained: bool,
}

impl AnnotationSender<'_> {
    fn send(&mut self, annotation: Annotation) {
        let trouble = match &self.socket {
            Some(socket) => match serde_json::to_vec(&annotation) {
                Ok(json) => match socket.send(&json) {
                    Ok(_) => None,
                    // The daemon has closed it while stopping.
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => None,
                    Err(error) => Some(error.to_string()),
                },
                Err(error) => Some(error.to_string()),
            },
            None => self.intake.take(annotation, &Sender::DAEMON).err().map(|refusal| refusal.to_string()),
        };
        if let Some(trouble) = trouble
            && !std::mem::replace(&mut self.complained, true)
        {
            tracing::warn!("an annotation of a simulated job was lost: {trouble}");
        }
    }
}
