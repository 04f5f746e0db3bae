//! Bytes a sample: the figures that the ring promises, on recorded and on generated traces.

use crate::ring::{Config, Reader, ring};

const MILLISECOND_NS: i64 = 1_000_000;
const BEGIN_NS: i64 = 1_795_207_211_009_094_000;
const CONFIG: Config = Config { retention_ns: 600_000 * MILLISECOND_NS, max_bytes: 2 << 20, resolution_ns: 1_000 };

/// Bytes that the readings took, beside the tables that an empty ring has.
fn data_bytes(reader: &Reader) -> f64 {
    let (_, empty) = ring(CONFIG).unwrap();
    (reader.bytes() - empty.bytes()) as f64
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

#[test]
fn a_recorded_training_job_takes_a_twentieth_of_a_byte_a_sample() {
    let samples = 78_346.0;
    let mut bytes = Vec::new();
    for gpu in include_str!("h200_ddp.txt").split("gpu ").skip(1) {
        let (mut writer, reader) = ring(CONFIG).unwrap();
        let (mut at_ns, mut used_bytes) = (BEGIN_NS, 0_u64);
        for line in gpu.lines().skip(1) {
            let (distance_us, steps) = line.split_once(' ').unwrap();
            at_ns += distance_us.parse::<i64>().unwrap() * 1_000;
            used_bytes = used_bytes.checked_add_signed(steps.parse::<i64>().unwrap() << 16).unwrap();
            writer.push(at_ns, used_bytes).unwrap();
        }
        println!("{} changes: {:.4} bytes a sample", reader.point_count(), data_bytes(&reader) / samples);
        bytes.push(data_bytes(&reader));
    }
    // To the byte: a code that costs more, or less, shows here.
    assert_eq!(bytes, [4_408.0, 3_424.0]);
    let each = bytes.iter().sum::<f64>() / (2.0 * samples);
    println!("both GPUs: {each:.4} bytes a sample");
    assert!(each <= 0.05, "{each} bytes a sample");
}

#[test]
fn an_allocator_shaped_trace_takes_less_than_a_twentieth_of_a_byte_a_sample() {
    let (mut writer, reader) = ring(CONFIG).unwrap();
    let mut random = Random(7);
    let sizes = [20, 2, 512, 64, 128, 1_024, 20, 20].map(|mib| mib << 20_u64);
    let mut used_bytes = 645_000_000_u64 >> 16 << 16;
    let samples = 600_000;
    for tick in 0..samples {
        let jitter_ns = random.below(60_000) as i64 - 30_000;
        // Ten changes a second, most of the sizes common ones.
        if random.below(100) == 0 {
            let odd = (1 + random.below(400)) * (2 << 20);
            let bytes = if random.below(4) == 0 { odd } else { sizes[random.below(8) as usize] };
            let falls = used_bytes > (70 << 30) || (random.below(2) == 0 && used_bytes > bytes);
            used_bytes = if falls { used_bytes - bytes } else { used_bytes + bytes };
        }
        writer.push(BEGIN_NS + tick * MILLISECOND_NS + jitter_ns, used_bytes).unwrap();
    }
    let each = data_bytes(&reader) / samples as f64;
    println!("{} changes: {each:.4} bytes a sample", reader.point_count());
    assert!(each <= 0.05, "{each} bytes a sample");
    assert_eq!((reader.point_count(), data_bytes(&reader)), (6_064, 27_200.0), "to the byte");
}

#[test]
fn a_change_at_every_sample_takes_less_than_three_bytes() {
    let (mut writer, reader) = ring(CONFIG).unwrap();
    let mut random = Random(11);
    let granules = 65_536_i64;
    let mut held = granules / 2;
    let samples = 600_000;
    for tick in 0..samples {
        let jitter_ns = random.below(60_001) as i64 - 30_000;
        let jump = 1 + random.below(4_096) as i64;
        let falls = if held < 4_096 { false } else { held > granules - 4_096 || random.below(2) == 0 };
        held += if falls { -jump } else { jump };
        writer.push(BEGIN_NS + tick * MILLISECOND_NS + jitter_ns, held.cast_unsigned() << 21).unwrap();
    }
    assert_eq!(reader.point_count(), samples as u64);
    let each = data_bytes(&reader) / samples as f64;
    println!("{each:.3} bytes a sample, {} bytes in all", reader.bytes());
    assert!(each <= 3.0, "{each} bytes a sample");
    assert_eq!(reader.bytes(), 1_753_984, "to the byte");
    let oldest_ns = reader.oldest_ns().unwrap();
    assert!(oldest_ns <= BEGIN_NS + 30_000, "ten minutes of it fit 2 MiB");
}
