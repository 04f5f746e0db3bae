//! A report as a picture: the curves with their peaks and the capacity, for a chat or a document.
//!
//! Invariant: each column of pixels has the lowest and highest value of its time, like the page's chart.

use super::curve::Point;
use super::model::{Gpu, Report};
use super::table::size;
use embedded_graphics::Pixel;
use embedded_graphics::mono_font::MonoTextStyle;
use embedded_graphics::mono_font::iso_8859_1::{FONT_9X15, FONT_10X20};
use embedded_graphics::pixelcolor::{Rgb888, RgbColor as _, WebColors as _};
use embedded_graphics::prelude::{DrawTarget, Drawable as _, OriginDimensions, Point as At, Primitive as _, Size};
use embedded_graphics::primitives::{Circle, PrimitiveStyle, Rectangle};
use embedded_graphics::text::{Alignment, Text};
use highwater_engine::recording::Times;
use std::convert::Infallible;

const WIDTH: u32 = 1600;
const HEIGHT: u32 = 800;
/// The plot inside the picture.
const LEFT: i32 = 110;
const RIGHT: i32 = 1580;
const TOP: i32 = 70;
/// Where the plot ends, and room for the legend below it.
const BOTTOM: i32 = 680;
/// What fits into a column of the legend: 462 pixels, 9 of them a character.
const CHARACTERS_OF_A_COLUMN: usize = 51;
/// Curves that have a place in the legend.
const MOST_NAMED: usize = 12;

/// Colors of curves, in the order of the page's.
const COLORS: [Rgb888; 8] = [
    Rgb888::new(0x0b, 0x62, 0xb8),
    Rgb888::new(0xb3, 0x47, 0x00),
    Rgb888::new(0x1c, 0x7a, 0x3e),
    Rgb888::new(0x8a, 0x3a, 0xb9),
    Rgb888::new(0xa8, 0x12, 0x3e),
    Rgb888::new(0x00, 0x70, 0x7a),
    Rgb888::new(0x6b, 0x55, 0x00),
    Rgb888::new(0x4a, 0x4a, 0x8f),
];
const LINE: Rgb888 = Rgb888::CSS_LIGHT_GRAY;
const TEXT: Rgb888 = Rgb888::new(0x16, 0x20, 0x2a);

/// A canvas of pixels.
struct Canvas(Vec<u8>);

impl OriginDimensions for Canvas {
    fn size(&self) -> Size {
        Size::new(WIDTH, HEIGHT)
    }
}

impl DrawTarget for Canvas {
    type Color = Rgb888;
    type Error = Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(&mut self, pixels: I) -> Result<(), Infallible> {
        for Pixel(at, color) in pixels {
            let (Ok(x), Ok(y)) = (usize::try_from(at.x), usize::try_from(at.y)) else { continue };
            if x < WIDTH as usize && y < HEIGHT as usize {
                let place = (y * WIDTH as usize + x) * 3;
                self.0[place..place + 3].copy_from_slice(&[color.r(), color.g(), color.b()]);
            }
        }
        Ok(())
    }
}

/// One curve with its labels, its interval and its color.
struct Drawn<'a> {
    gpu: &'a Gpu,
    name: String,
    peak: String,
    /// What the left edge of the plot is, on its clock.
    begin_ns: i64,
    /// When it began, on its clock.
    from_ns: i64,
    end_ns: i64,
    color: Rgb888,
}

/// Maps time and bytes to pixels.
struct Scale {
    length_ns: i64,
    most_bytes: u64,
}

impl Scale {
    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "pixels")]
    fn x(&self, after_ns: i64) -> i32 {
        LEFT + (after_ns as f64 / self.length_ns as f64 * f64::from(RIGHT - LEFT)) as i32
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "pixels")]
    fn y(&self, bytes: u64) -> i32 {
        BOTTOM - (bytes as f64 / self.most_bytes as f64 * f64::from(BOTTOM - TOP)) as i32
    }

    /// When a column of pixels begins.
    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "pixels")]
    fn begins_ns(&self, x: i32) -> i64 {
        (f64::from(x - LEFT) / f64::from(RIGHT - LEFT) * self.length_ns as f64) as i64
    }
}

/// The picture of these recordings as PNG: those that ran at the same time on one axis, all others from their begin.
///
/// # Errors
/// It cannot be encoded.
pub fn picture(reports: &[Report]) -> Result<Vec<u8>, png::EncodingError> {
    let mut canvas = Canvas(vec![255; (WIDTH * HEIGHT * 3) as usize]);
    let several = reports.len() > 1;
    let offsets = super::axis::offsets(reports);
    let gpus = reports
        .iter()
        .zip(offsets)
        .flat_map(|(report, offset_ns)| report.gpus.iter().map(move |gpu| (report, offset_ns.unwrap_or(0), gpu)));
    let drawn: Vec<Drawn<'_>> = gpus
        .enumerate()
        .map(|(nth, (report, offset_ns, gpu))| Drawn {
            gpu,
            peak: gpu.usage.peak.map_or_else(
                || "no memory is known".to_owned(),
                |(bytes, at_ns)| format!("peak {} at {}", size(bytes), report.time(at_ns - report.begin_ns)),
            ),
            name: if several {
                format!("{}, GPU {}", report.name, gpu.device.index)
            } else {
                format!("GPU {}", gpu.device.index)
            },
            begin_ns: report.begin_ns - offset_ns,
            from_ns: report.begin_ns,
            end_ns: report.end_ns,
            color: COLORS[nth % COLORS.len()],
        })
        .collect();
    let highest = |gpu: &Gpu| {
        let peak = gpu.usage.peak.map_or(0, |(bytes, _)| bytes);
        // As in the page, the capacity is shown unless that flattens the curve.
        gpu.device.usable_bytes().filter(|usable| peak > usable / 8).map_or(peak, |usable| usable.max(peak))
    };
    let most_bytes = drawn.iter().map(|one| highest(one.gpu)).max().unwrap_or(0).max(1 << 20);
    let length_ns = drawn.iter().map(|one| one.end_ns - one.begin_ns).max().unwrap_or(0).max(1);
    let scale = Scale { length_ns, most_bytes: most_bytes + most_bytes / 16 };
    let title = match reports {
        [one] => one.name.clone(),
        _ => format!("{} recordings", reports.len()),
    };
    write(&mut canvas, &title, At::new(20, 28), TEXT, true);
    // Beside the title, in the color of a warning: pictures are shared without the text around them.
    if let Some(notice) = reports.iter().find_map(|report| report.origin.notice()) {
        let left = i32::try_from(title.chars().take(80).count()).unwrap_or(80) * 10 + 40;
        write(&mut canvas, &notice, At::new(left, 28), Rgb888::CSS_CRIMSON, true);
    }
    if let [one] = reports
        && let Some(headline) = super::text::headline(one)
    {
        write(&mut canvas, &headline, At::new(20, 52), TEXT, false);
    }
    axes(&mut canvas, &scale, reports.iter().all(|report| report.origin.times == Times::Readings));
    for one in &drawn {
        curve(&mut canvas, &scale, one);
    }
    for one in &drawn {
        peak(&mut canvas, &scale, one);
    }
    legend(&mut canvas, &drawn);
    encode(&canvas)
}

fn encode(canvas: &Canvas) -> Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, WIDTH, HEIGHT);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&canvas.0)?;
    writer.finish()?;
    Ok(bytes)
}

/// Text; what the font does not have is a question mark.
fn write(canvas: &mut Canvas, text: &str, at: At, color: Rgb888, is_large: bool) {
    let font = if is_large { &FONT_10X20 } else { &FONT_9X15 };
    let _ = Text::new(text, at, MonoTextStyle::new(font, color)).draw(canvas);
}

fn fill(canvas: &mut Canvas, (left, top): (i32, i32), (right, bottom): (i32, i32), color: Rgb888) {
    let size = Size::new((right - left).max(1).unsigned_abs(), (bottom - top).max(1).unsigned_abs());
    let _ = Rectangle::new(At::new(left, top), size).into_styled(PrimitiveStyle::with_fill(color)).draw(canvas);
}

/// Rounds up to 1, 2 or 5 times a power of ten.
fn round(size: f64) -> f64 {
    let power = 10_f64.powf(size.log10().floor());
    let digit = size / power;
    power
        * if digit <= 1.0 {
            1.0
        } else if digit <= 2.0 {
            2.0
        } else if digit <= 5.0 {
            5.0
        } else {
            10.0
        }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, clippy::cast_sign_loss, reason = "ticks")]
fn axes(canvas: &mut Canvas, scale: &Scale, are_readings: bool) {
    let unit = if scale.most_bytes >= 1 << 31 { (1_u64 << 30) as f64 } else { (1_u64 << 20) as f64 };
    let every = round(scale.most_bytes as f64 / unit / 8.0) * unit;
    let mut at = 0.0;
    while at <= scale.most_bytes as f64 {
        let y = scale.y(at as u64);
        fill(canvas, (LEFT, y), (RIGHT, y + 1), LINE);
        let style = MonoTextStyle::new(&FONT_9X15, TEXT);
        let name = if unit > 2e6 { "GiB" } else { "MiB" };
        let text = format!("{} {name}", at / unit);
        let _ = Text::with_alignment(&text, At::new(LEFT - 8, y + 5), style, Alignment::Right).draw(canvas);
        at += every;
    }
    let every_s = round(scale.length_ns as f64 / 1e9 / 10.0);
    let digits = (-every_s.log10().floor()).clamp(0.0, 6.0) as usize;
    let mut at_s = 0.0;
    while at_s * 1e9 <= scale.length_ns as f64 {
        let x = scale.x((at_s * 1e9) as i64);
        fill(canvas, (x, BOTTOM), (x + 1, BOTTOM + 6), TEXT);
        let style = MonoTextStyle::new(&FONT_9X15, TEXT);
        let text = if are_readings { format!("{:.0}", at_s * 1e3) } else { format!("{at_s:.digits$} s") };
        let _ = Text::with_alignment(&text, At::new(x, BOTTOM + 22), style, Alignment::Center).draw(canvas);
        at_s += every_s;
    }
}

/// The least and the most of each column of pixels.
fn curve(canvas: &mut Canvas, scale: &Scale, one: &Drawn<'_>) {
    let points: &[Point] = one.gpu.usage.curve.points();
    for x in LEFT..RIGHT {
        let (from_ns, to_ns) = (one.begin_ns + scale.begins_ns(x), one.begin_ns + scale.begins_ns(x + 1));
        if from_ns >= one.end_ns {
            break;
        }
        if to_ns <= one.from_ns {
            continue;
        }
        // The value before the column's begin counts too, so that a change at the begin is drawn as a vertical line.
        let first = points.partition_point(|point| point.at_ns < from_ns).saturating_sub(1);
        let inside = points[first..].iter().take_while(|point| point.at_ns < to_ns || point.at_ns <= from_ns);
        let (mut least, mut most) = (u64::MAX, None);
        for used in inside.filter_map(|point| point.used) {
            least = least.min(used);
            most = most.max(Some(used));
        }
        match most {
            Some(most) => fill(canvas, (x, scale.y(most) - 1), (x + 1, scale.y(least) + 1), one.color),
            None => fill(canvas, (x, BOTTOM - 3), (x + 1, BOTTOM), Rgb888::CSS_CRIMSON),
        }
    }
    if let Some(usable) = one.gpu.device.usable_bytes().filter(|usable| *usable < scale.most_bytes) {
        let y = scale.y(usable);
        (LEFT..RIGHT).step_by(14).for_each(|x| fill(canvas, (x, y), (x + 8, y + 1), one.color));
    }
}

fn peak(canvas: &mut Canvas, scale: &Scale, one: &Drawn<'_>) {
    let Some((bytes, at_ns)) = one.gpu.usage.peak else { return };
    let at = At::new(scale.x(at_ns - one.begin_ns), scale.y(bytes));
    let style = PrimitiveStyle::with_fill(one.color);
    let _ = Circle::with_center(at, 9).into_styled(style).draw(canvas);
}

/// As much of a name as there is room for, in characters: its begin, and its end, which says which GPU it is.
fn fitted(name: &str, room: usize) -> String {
    const END: usize = 8;
    let length = name.chars().count();
    if length <= room {
        return name.to_owned();
    }
    let begin: String = name.chars().take(room.saturating_sub(END + 2)).collect();
    let end: String = name.chars().skip(length - END.min(length)).collect();
    format!("{begin}..{end}")
}

/// A curve's name and peak, within its column as far as the peak leaves room.
fn entry(name: &str, peak: &str) -> String {
    let room = CHARACTERS_OF_A_COLUMN.saturating_sub(peak.chars().count() + 2);
    format!("{}: {peak}", fitted(name, room))
}

/// Each curve with its peak, in columns below the plot.
fn legend(canvas: &mut Canvas, drawn: &[Drawn<'_>]) {
    for (nth, one) in drawn.iter().take(MOST_NAMED).enumerate() {
        let (column, row) = (i32::try_from(nth / 4).unwrap_or(0), i32::try_from(nth % 4).unwrap_or(0));
        let at = At::new(LEFT + column * 490, BOTTOM + 48 + row * 20);
        fill(canvas, (at.x, at.y - 6), (at.x + 20, at.y - 2), one.color);
        write(canvas, &entry(&one.name, &one.peak), At::new(at.x + 28, at.y), TEXT, false);
    }
    if drawn.len() > MOST_NAMED {
        let text = format!("and {} more", drawn.len() - MOST_NAMED);
        write(canvas, &text, At::new(LEFT, BOTTOM + 48 + 4 * 20), TEXT, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::hand;

    fn pixels_of(reports: &[Report]) -> Vec<u8> {
        let picture = picture(reports).expect("encoded");
        let mut reader = png::Decoder::new(std::io::Cursor::new(picture)).read_info().expect("a picture");
        let mut pixels = vec![0; reader.output_buffer_size().expect("small")];
        let info = reader.next_frame(&mut pixels).expect("pixels");
        assert_eq!((info.width, info.height), (WIDTH, HEIGHT));
        pixels
    }

    fn color_at(pixels: &[u8], x: i32, y: i32) -> Rgb888 {
        let place = (usize::try_from(y).expect("inside") * WIDTH as usize + usize::try_from(x).expect("inside")) * 3;
        Rgb888::new(pixels[place], pixels[place + 1], pixels[place + 2])
    }

    #[test]
    fn a_simulated_recording_says_so_in_its_picture() {
        let crimson = |source: Option<&str>| {
            let mut report = hand::report("name", &[vec![(0, Some(1 << 30)), (9, Some(2 << 30))]]);
            report.origin.source = source.map(str::to_owned);
            let pixels = pixels_of(&[report]);
            let warning = Rgb888::CSS_CRIMSON;
            pixels.chunks(3).filter(|pixel| *pixel == [warning.r(), warning.g(), warning.b()]).count()
        };
        assert_eq!((crimson(None), crimson(Some("nvml 580"))), (0, 0));
        assert!(crimson(Some("sim:demo")) > 500);
    }

    #[test]
    fn what_ran_at_the_same_time_is_below_each_other() {
        let first = hand::report("first", &[vec![(0, Some(1 << 30)), (999, Some(1 << 30))]]);
        let mut second = hand::report("second", &[vec![(500, Some(2 << 30)), (999, Some(2 << 30))]]);
        second.begin_ns = 500;
        let pixels = pixels_of(&[first, second]);
        let scale = Scale { length_ns: 1_000, most_bytes: (2 << 30) + (2 << 30) / 16 };
        let color = |at_ns: i64| color_at(&pixels, scale.x(at_ns), scale.y(2 << 30));
        assert_eq!(color(750), COLORS[1]);
        assert_ne!(color(250), COLORS[1], "it began later");
    }

    #[test]
    fn a_long_name_keeps_its_begin_and_its_gpu() {
        assert_eq!(fitted("memory_winograd.txt GPU 0", 25), "memory_winograd.txt GPU 0");
        assert_eq!(fitted("memory_winograd.txt GPU 12", 25), "memory_winograd..t GPU 12");
        assert_eq!(fitted("memory_winograd.txt GPU 12", 3), "..t GPU 12");
    }

    #[test]
    fn an_entry_of_the_legend_ends_before_the_next_column_and_has_its_gpu() {
        for kernel in ["cudnn", "direct", "fft", "im2col", "winograd", "winograd_of_a_long_name_that_goes_on_and_on"] {
            let shown = entry(&format!("memory_{kernel}.txt GPU 0"), "peak 31.24 GiB at reading 32");
            assert!(shown.chars().count() <= CHARACTERS_OF_A_COLUMN, "{shown}");
            assert!(shown.contains("GPU 0: peak 31.24 GiB at reading 32"), "{shown}");
        }
    }

    #[test]
    fn a_spike_of_one_reading_is_in_the_picture() {
        let readings = |at_ns: i64| if at_ns == 300 { 40 << 30 } else { 10 << 30 };
        let report = hand::report("spike \u{7f}", &[(0..1_000).map(|at_ns| (at_ns, Some(readings(at_ns)))).collect()]);
        let pixels = pixels_of(&[report]);
        let scale = Scale { length_ns: 1_000, most_bytes: (40 << 30) + (40 << 30) / 16 };
        let color = |x: i32, y: i32| color_at(&pixels, x, y);
        let (x, y) = (scale.x(300), scale.y(25 << 30));
        assert!((x - 1..=x + 1).any(|x| color(x, y) == COLORS[0]), "no spike at {x}, {y}");
        assert_ne!(color(scale.x(500), y), COLORS[0]);
        assert_eq!(color(scale.x(500), scale.y(10 << 30)), COLORS[0]);
    }
}
