//! Raw points: every change of memory with the time of its reading. The SDK cannot make them, since it sets the time itself.
//!
//! Enters: rings. Leaves: requests with one resource per GPU. Points have no attributes, which would be repeated on
//! each of them. A graph that joins points with lines must draw steps. So if a value was held for longer than a period,
//! its last moment has a point too, one period before the change. The newest reading also has a point, so that a value
//! at rest is not taken for an unknown one. A gap has no point inside. It begins with a point without a value, one
//! period after the last good reading, so that no graph draws a line across it. Times of one GPU only rise. Invariant:
//! it only reads, so it never makes a tick late.

use super::follow::{Follow, Stretch};
use super::metrics::{only, unix};
use super::names::MEMORY_RAW;
use super::resource::{resource, scope};
use highwater_core::clock::SECOND_NS;
use highwater_core::gpu::{Device, GpuState};
use highwater_core::ring::Point;
use highwater_engine::node::Node;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use opentelemetry_proto::tonic::metrics::v1::{DataPointFlags, Gauge, NumberDataPoint, ResourceMetrics, ScopeMetrics};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// The most points in one request: about 400 kB, which every receiver accepts.
const MOST_POINTS: usize = 20_000;

/// After this long without a reading, a point without a value is exported, although a reading may still come.
const PATIENCE_NS: i64 = 2 * SECOND_NS;

/// Follows every ring of the current node.
#[derive(Default)]
pub struct RawPoints {
    follow: Follow,
    curves: Vec<Curve>,
    /// What to add to the times of the last points to get Unix time.
    shift_ns: i64,
    /// The sampling period at the last call.
    period_ns: i64,
}

/// What was sent of one GPU.
#[derive(Debug, Clone)]
struct Curve {
    device: Device,
    /// Time of the last point, nanoseconds. Only later points are sent.
    last_ns: i64,
    /// Time of the newest reading that was processed.
    newest_ns: i64,
    /// The value at the last point, bytes; `None` in a gap.
    held: Option<u64>,
    /// The last good reading before a gap that has not been exported yet.
    gap_ns: Option<i64>,
}

/// Requests with their numbers of points.
type Requests = Vec<(ExportMetricsServiceRequest, u64)>;

/// The points that one GPU's curve has gained.
pub(super) struct Drawn {
    pub device: Device,
    /// In order of time.
    pub points: Vec<Point>,
    /// What to add to their times to get Unix time.
    pub shift_ns: i64,
    /// The time between readings.
    pub period_ns: i64,
}

impl RawPoints {
    /// What the rings have gained since the last call.
    pub fn advance(&mut self, node: Option<&Arc<Node>>, attributes: &[(String, String)]) -> Requests {
        requests(&self.draw(node), attributes)
    }

    /// What the rings have gained since the last call, GPU by GPU.
    pub(super) fn draw(&mut self, node: Option<&Arc<Node>>) -> Vec<Drawn> {
        let mut all = Vec::new();
        if node.is_none_or(|node| !self.follow.is_of(node)) {
            self.end_curves(&mut all);
        }
        let Some(node) = node else { return all };
        if !self.follow.is_of(node) {
            self.follow.begin(node);
            self.curves = node.gpus.iter().map(|gpu| Curve::of(gpu.device.clone())).collect();
        }
        let tick_ns = node.ticks.period_ns.load(Relaxed).max(1);
        let shift_ns = node.clock.unix_shift_ns();
        (self.shift_ns, self.period_ns) = (shift_ns, tick_ns);
        for (position, curve) in self.curves.iter_mut().enumerate() {
            let mut points = Vec::new();
            let period_ns = node.gpus.get(position).and_then(GpuState::sampling_period_ns).unwrap_or(tick_ns);
            match self.follow.advance(position) {
                Some(stretch) => curve.draw(&stretch, period_ns, &mut points),
                None => curve.rest(node.clock.now_ns(), period_ns, &mut points),
            }
            all.push(Drawn { device: curve.device.clone(), points, shift_ns, period_ns });
        }
        all
    }

    /// Called when the node is gone, or another one has come. Exports the readings since the last call, and ends every
    /// curve with a point without a value, one period after its newest reading.
    fn end_curves(&mut self, all: &mut Vec<Drawn>) {
        let (shift_ns, period_ns) = (self.shift_ns, self.period_ns);
        for (position, mut curve) in std::mem::take(&mut self.curves).into_iter().enumerate() {
            let mut points = Vec::new();
            if let Some(stretch) = self.follow.advance(position) {
                curve.draw(&stretch, period_ns, &mut points);
            }
            if curve.held.is_some() {
                curve.push(Point { at_ns: curve.newest_ns + period_ns, used: None }, &mut points);
            }
            all.push(Drawn { device: curve.device, points, shift_ns, period_ns });
        }
        self.follow = Follow::default();
    }
}

/// The requests that carry the drawn points.
pub(super) fn requests(drawn: &[Drawn], attributes: &[(String, String)]) -> Requests {
    let mut requests = Requests::new();
    for Drawn { device, points, shift_ns, .. } in drawn {
        add(&mut requests, device, attributes, points, *shift_ns);
    }
    requests
}

impl Curve {
    fn of(device: Device) -> Self {
        Self { device, last_ns: i64::MIN, newest_ns: i64::MIN, held: None, gap_ns: None }
    }

    /// The points that draw a stretch, in order of time.
    fn draw(&mut self, stretch: &Stretch, period_ns: i64, drawn: &mut Vec<Point>) {
        if !stretch.continues {
            self.take(stretch.begin, period_ns, drawn);
        }
        for change in &stretch.changes {
            self.take(*change, period_ns, drawn);
        }
        self.newest_ns = stretch.end.at_ns;
        if stretch.end.used.is_some() {
            self.take(stretch.end, period_ns, drawn);
            self.hold_until(stretch.end.at_ns, period_ns, drawn);
        } else {
            // A gap has begun at the newest reading, and it may never end. The value of that reading is exported before
            // the gap.
            self.take(Point { used: stretch.last, ..stretch.end }, period_ns, drawn);
            self.take(stretch.end, period_ns, drawn);
        }
    }

    /// Called if nothing new was read. After `PATIENCE_NS` the curve has no value.
    fn rest(&mut self, now_ns: i64, period_ns: i64, drawn: &mut Vec<Point>) {
        if self.held.is_some() && now_ns - self.newest_ns > PATIENCE_NS {
            self.push(Point { at_ns: self.newest_ns + period_ns, used: None }, drawn);
            self.gap_ns = None;
        }
    }

    fn take(&mut self, point: Point, period_ns: i64, drawn: &mut Vec<Point>) {
        match (point.used, self.held) {
            (Some(used), Some(held)) if used == held && self.gap_ns.is_none() => {}
            (Some(_), _) => {
                match self.gap_ns.take() {
                    Some(gap_ns) if is_long(point.at_ns - gap_ns, period_ns) => {
                        self.push(Point { at_ns: gap_ns + period_ns, used: None }, drawn);
                    }
                    Some(_) => {}
                    None => self.hold_until(point.at_ns - period_ns, period_ns / 2, drawn),
                }
                self.push(point, drawn);
            }
            (None, Some(_)) => {
                self.hold_until(point.at_ns, period_ns, drawn);
                self.gap_ns.get_or_insert(point.at_ns);
            }
            (None, None) => {}
        }
    }

    /// Adds a point of the held value at `at_ns`, if the last point is more than `period_ns` before it. Before a
    /// change, `period_ns` is half a period, because readings jitter.
    fn hold_until(&mut self, at_ns: i64, period_ns: i64, drawn: &mut Vec<Point>) {
        if self.held.is_some() && at_ns.saturating_sub(self.last_ns) > period_ns {
            self.push(Point { at_ns, used: self.held }, drawn);
        }
    }

    fn push(&mut self, point: Point, drawn: &mut Vec<Point>) {
        if point.at_ns > self.last_ns {
            (self.last_ns, self.held) = (point.at_ns, point.used);
            drawn.push(point);
        }
    }
}

/// Whether a gap is long enough to be one: readings jitter by less than half a period.
fn is_long(gap_ns: i64, period_ns: i64) -> bool {
    gap_ns > period_ns + period_ns / 2
}

/// Adds the points of one GPU to the last request, or to a new one if that is full.
fn add(requests: &mut Requests, device: &Device, attributes: &[(String, String)], points: &[Point], shift_ns: i64) {
    for points in points.chunks(MOST_POINTS) {
        let points: Vec<_> = points.iter().map(|point| data_point(*point, shift_ns)).collect();
        let count = points.len() as u64;
        let resource_metrics = of_gpu(device, attributes, points);
        match requests.last_mut().filter(|(_, known)| known + count <= MOST_POINTS as u64) {
            Some((request, known)) => {
                request.resource_metrics.push(resource_metrics);
                *known += count;
            }
            None => requests.push((ExportMetricsServiceRequest { resource_metrics: vec![resource_metrics] }, count)),
        }
    }
}

fn data_point(point: Point, shift_ns: i64) -> NumberDataPoint {
    let value = point.used.map(|used| Value::AsInt(i64::try_from(used).unwrap_or(i64::MAX)));
    let flags = if value.is_none() { DataPointFlags::NoRecordedValueMask as u32 } else { 0 };
    let time_unix_nano = unix(point.at_ns.saturating_add(shift_ns));
    NumberDataPoint { time_unix_nano, value, flags, ..NumberDataPoint::default() }
}

/// One GPU's resource. Its instance is the GPU, because some receivers identify a series by nothing else of the
/// resource.
fn of_gpu(device: &Device, attributes: &[(String, String)], data_points: Vec<NumberDataPoint>) -> ResourceMetrics {
    let of_process = |name: &str| attributes.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
    let instance = match of_process("service.instance.id") {
        Some(instance) => format!("{instance}/{}", device.uuid),
        None => device.uuid.clone(),
    };
    let own = [
        ("service.instance.id", Some(instance.as_str())),
        ("hw.id", Some(device.uuid.as_str())),
        ("hw.type", Some("gpu")),
        ("hw.vendor", Some("NVIDIA")),
        ("hw.model", device.name.as_deref()),
        ("hw.parent", device.parent_uuid.as_deref()),
        ("highwater.gpu.index", Some(device.index.as_str())),
    ];
    let own = own.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())));
    let own: Vec<(String, String)> = own.collect();
    let others = attributes.iter().filter(|(name, _)| own.iter().all(|(known, _)| known != name));
    let metric = only(&MEMORY_RAW, Data::Gauge(Gauge { data_points }));
    ResourceMetrics {
        resource: Some(resource(others.chain(&own))),
        scope_metrics: vec![ScopeMetrics { scope: Some(scope()), metrics: vec![metric], ..ScopeMetrics::default() }],
        ..ResourceMetrics::default()
    }
}

#[cfg(test)]
mod tests;
