//! Every change of memory with the time of its reading: points that no SDK can make, since it stamps them itself.
//!
//! Enters: rings. Leaves: requests with one resource a GPU and no attributes on points, which would be repeated on each.
//! A graph that joins points with lines must draw steps: where a value was held for longer than a period, its last
//! moment has a point too, one period before the change; and the newest reading has one, so that a value that rests is
//! not taken for one that is not known. A gap has no point within; where it begins, a point says that there is no value,
//! so that nobody draws across it. Invariant: it only reads, so that it never makes a tick late.

use super::follow::{Follow, Stretch};
use super::metrics::{only, unix};
use super::names::MEMORY_RAW;
use super::resource::{resource, scope};
use crate::node::Node;
use crate::ring::Point;
use crate::source::Device;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use opentelemetry_proto::tonic::metrics::v1::{DataPointFlags, Gauge, NumberDataPoint, ResourceMetrics, ScopeMetrics};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// The most points of one request: some 400 kB, which every receiver takes.
const MOST_POINTS: usize = 20_000;

/// Follows every ring of the node of the moment.
#[derive(Default)]
pub struct RawPoints {
    follow: Follow,
    curves: Vec<Curve>,
}

/// What was last sent of one GPU.
#[derive(Debug, Default, Clone)]
struct Curve {
    sent: Option<(i64, u64)>,
}

impl RawPoints {
    /// What the rings have gained since the last call, as requests with their numbers of points.
    pub fn advance(
        &mut self,
        node: Option<&Arc<Node>>,
        attributes: &[(String, String)],
    ) -> Vec<(ExportMetricsServiceRequest, u64)> {
        let Some(node) = node else { return Vec::new() };
        if self.follow.is_new(node) {
            self.curves = vec![Curve::default(); node.rings.len()];
        }
        let period_ns = node.ticks.period_ns.load(Relaxed).max(1);
        let shift_ns = node.clock.unix_shift_ns();
        let mut requests: Vec<(ExportMetricsServiceRequest, u64)> = Vec::new();
        for (position, (curve, gpu)) in self.curves.iter_mut().zip(node.gpus.iter()).enumerate() {
            let Some(stretch) = self.follow.advance(node, position) else { continue };
            let points = curve.points(&stretch, period_ns);
            for points in points.chunks(MOST_POINTS) {
                let points: Vec<_> = points.iter().map(|point| data_point(*point, shift_ns)).collect();
                let count = points.len() as u64;
                let resource_metrics = of_gpu(&gpu.device, attributes, points);
                match requests.last_mut().filter(|(_, known)| known + count <= MOST_POINTS as u64) {
                    Some((request, known)) => {
                        request.resource_metrics.push(resource_metrics);
                        *known += count;
                    }
                    None => {
                        requests.push((ExportMetricsServiceRequest { resource_metrics: vec![resource_metrics] }, count))
                    }
                }
            }
        }
        requests
    }
}

impl Curve {
    /// The points that draw a stretch, in order of time.
    fn points(&mut self, stretch: &Stretch, period_ns: i64) -> Vec<Point> {
        let mut drawn = Vec::with_capacity(stretch.points.len() + 2);
        if !stretch.continues {
            self.sent = None;
        }
        for point in &stretch.points {
            match (self.sent, point.used) {
                (Some((_, held)), Some(used)) if held == used => {}
                (_, Some(used)) => {
                    self.hold_until(point.at_ns, period_ns, &mut drawn);
                    self.sent = Some((point.at_ns, used));
                    drawn.push(*point);
                }
                (Some(_), None) => {
                    self.hold_until(point.at_ns, period_ns, &mut drawn);
                    self.sent = None;
                    drawn.push(*point);
                }
                (None, None) => {}
            }
        }
        // What the last reading found may be the next stretch's first change, so that the value is held up to before it.
        self.hold_until(stretch.to_ns, period_ns, &mut drawn);
        drawn
    }

    /// A point of the value that was held until one period before `at_ns`, if it was held for longer than that: readings
    /// wobble, so that half a period more is none.
    fn hold_until(&mut self, at_ns: i64, period_ns: i64, drawn: &mut Vec<Point>) {
        if let Some((sent_ns, used)) = self.sent
            && at_ns - sent_ns > period_ns + period_ns / 2
        {
            let held_ns = at_ns - period_ns;
            self.sent = Some((held_ns, used));
            drawn.push(Point { at_ns: held_ns, used: Some(used) });
        }
    }
}

fn data_point(point: Point, shift_ns: i64) -> NumberDataPoint {
    let value = point.used.map(|used| Value::AsInt(i64::try_from(used).unwrap_or(i64::MAX)));
    let flags = if value.is_none() { DataPointFlags::NoRecordedValueMask as u32 } else { 0 };
    let time_unix_nano = unix(point.at_ns.saturating_add(shift_ns));
    NumberDataPoint { time_unix_nano, value, flags, ..NumberDataPoint::default() }
}

/// One GPU's resource. Its instance is the GPU: some receivers know a series by nothing else of the resource.
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
        ("hw.name", device.name.as_deref()),
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
