//! What expandable segments trade: memory held against time in the driver, by `slack`.
//!
//! Replays the recorded traces on the simulated device, whose calls take what they took on an H200, prints a table
//! and draws it:
//!
//! ```text
//! cargo run --release --example slack_curve -- -o docs/slack-curve.svg
//! ```

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use vramalloc::driver::sim::SimDriver;
use vramalloc::replay::Replay;
use vramalloc::trace::Trace;
use vramalloc::{CachingAllocator, Config, StreamHandle};

const USAGE: &str = "usage: slack_curve [-o FILE.svg]\n\n\
    Prints what each slack costs on the recorded traces; with -o, draws it to FILE.svg, too.";
const TRACES: [&str; 6] = ["resnet50", "gpt2_amp", "gnn", "llama_generate", "unet_multires", "serving_streams"];
const SLACKS: [f64; 8] = [1.0, 1.005, 1.01, 1.014, 1.02, 1.03, 1.05, 1.1];

/// Others on the same traces and cost model: driver time of the first pass in ms, mean ratio.
const OTHERS: [(&str, f64, f64); 6] = [
    ("prototype: 2 MiB handles, slack 1.0", 1530.0, 1.007),
    ("prototype: 8 MiB handles", 313.0, 1.028),
    ("prototype: 16 MiB handles", 141.0, 1.038),
    ("prototype: handles grow by 1/256, up to 128 MiB", 720.0, 1.011),
    ("prototype: handles grow by 1/32, up to 32 MiB, slack 1.02", 170.0, 1.033),
    ("PyTorch, expandable segments", 118.0, 1.19),
];
/// The size of the text in pixels; plotters divides what it is given by 1.24.
const TEXT: i32 = 13;
const BLUE: RGBColor = RGBColor(20, 80, 170);
const PALE: RGBColor = RGBColor(130, 165, 215);
const GREY: RGBColor = RGBColor(90, 90, 90);

/// For the first and the second pass: peak reserved so far over peak allocated, and driver time in ms.
fn replay(trace: &Trace, conf: &str) -> Result<[(f64, f64); 2], Box<dyn Error>> {
    let driver = SimDriver::builder().backing(false).log(false).build();
    let streams: Vec<StreamHandle> = trace.streams.iter().map(|_| driver.create_stream()).collect();
    let allocator = CachingAllocator::new(driver, conf.parse::<Config>()?)?;
    let mut replay = Replay::new(&allocator, trace, &streams)?;
    let mut pass = || {
        let ms = replay.pass()?.driver.total().nanos as f64 / 1e6;
        Ok::<_, vramalloc::Error>((replay.report().ratio(), ms))
    };
    Ok([pass()?, pass()?])
}

/// All traces with one slack: for the first and the second pass, mean ratio, worst ratio, driver time.
struct Point {
    slack: f64,
    passes: [(f64, f64, f64); 2],
}

impl Point {
    fn new(traces: &[Trace], slack: f64) -> Result<Self, Box<dyn Error>> {
        let conf = format!("segments:expandable,slack:{slack}");
        let runs = traces.iter().map(|trace| replay(trace, &conf)).collect::<Result<Vec<_>, _>>()?;
        let passes = [0, 1].map(|pass| {
            let ratios = runs.iter().map(|run| run[pass].0);
            let mean = (ratios.clone().map(f64::ln).sum::<f64>() / runs.len() as f64).exp();
            (mean, ratios.fold(1.0, f64::max), runs.iter().map(|run| run[pass].1).sum())
        });
        Ok(Self { slack, passes })
    }

    fn label(&self) -> String {
        let default = if self.slack == Config::default().slack { " (default)" } else { "" };
        format!("{:?}{default}", self.slack)
    }
}

type Pixel = (i32, i32);
/// Left, top, right and bottom.
type Area = [i32; 4];

/// Marks a line as taken: no label goes there.
fn take_line(taken: &mut Vec<Area>, from: Pixel, to: Pixel) {
    taken.extend((0..=100).map(|step| {
        let (x, y) = (from.0 + (to.0 - from.0) * step / 100, from.1 + (to.1 - from.1) * step / 100);
        [x - 5, y - 5, x + 5, y + 5]
    }));
}

/// Where a label begins, on the point's right, or ends, on its left: as high or low as there is room.
fn place(taken: &mut Vec<Area>, (x, y): Pixel, label: &str) -> Option<(Pixel, HPos)> {
    let (width, height) = (label.len() as i32 * TEXT * 3 / 5, TEXT / 2 + 1);
    let (area, side) = (0..200).find_map(|i| {
        let y = y + (i / 4 * 4) * if i % 2 == 0 { -1 } else { 1 };
        let (left, side) = if i % 4 < 2 { (x + 10, HPos::Left) } else { (x - 10 - width, HPos::Right) };
        let a = [left, y - height, left + width, y + height];
        let free = !taken.iter().any(|b| a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]);
        free.then_some((a, side))
    })?;
    taken.push(area);
    Some(((if area[0] > x { x + 10 } else { x - 10 }, area[1] + height), side))
}

fn draw(points: &[Point], svg: &mut String) -> Result<(), Box<dyn Error>> {
    let text = |color: RGBColor| ("sans-serif", f64::from(TEXT) * 1.24).into_font().color(&color);
    let percent = |ratio: f64| ((ratio - 1.0) * 100.0).max(0.01);
    let first = || points.iter().map(|point| point.passes[0]);
    let mean: Vec<_> = first().map(|(mean, _, ms)| (ms, percent(mean))).collect();
    let worst: Vec<_> = first().map(|(_, worst, ms)| (ms, percent(worst))).collect();
    let others = OTHERS.map(|(name, ms, ratio)| (name, (ms, percent(ratio))));
    let axis = |of: fn(&(f64, f64)) -> f64| {
        let all = || mean.iter().chain(&worst).chain(others.iter().map(|(_, at)| at)).map(of);
        let range = all().fold(f64::MAX, f64::min) / 1.25..all().fold(0.0, f64::max) * 1.25;
        let ticks = (-2..5).flat_map(|tens| [1.0, 2.0, 3.0, 5.0, 7.0].map(|unit| unit * 10f64.powi(tens)));
        range.clone().log_scale().with_key_points(ticks.filter(|tick| range.contains(tick)).collect())
    };
    let root = SVGBackend::with_string(svg, (1000, 640)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("Expandable segments: memory held against time in the driver", text(BLACK))
        .margin(14)
        .x_label_area_size(48)
        .y_label_area_size(56)
        .build_cartesian_2d(axis(|at| at.0), axis(|at| at.1))?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(230, 230, 230))
        .x_desc("driver time of the first pass, ms, six traces together (modelled after an H200)")
        .y_desc("peak reserved beyond peak allocated, first pass, %")
        .x_label_formatter(&|ms| format!("{ms:.0}"))
        .y_label_formatter(&|percent| {
            format!("{percent:.3}").trim_end_matches(['0']).trim_end_matches('.').to_owned()
        })
        .label_style(text(GREY))
        .axis_desc_style(text(BLACK))
        .draw()?;
    let (xs, ys) = chart.plotting_area().get_pixel_range();
    let [all, none] = [i32::MAX, i32::MIN];
    let mut taken = vec![[none, none, xs.start, all], [none, none, all, ys.start]];
    taken.extend([[xs.end, none, all, all], [none, ys.end, all, all]]);
    let mut wanted = Vec::new();
    for (line, color, name) in [(&worst, PALE, "worst trace"), (&mean, BLUE, "geometric mean")] {
        let line: Vec<Pixel> = line.iter().map(|at| chart.backend_coord(at)).collect();
        root.draw(&PathElement::new(line.clone(), color.stroke_width(2)))?;
        line.windows(2).for_each(|ends| take_line(&mut taken, ends[0], ends[1]));
        line.iter().try_for_each(|at| root.draw(&Circle::new(*at, 4, color.filled())))?;
        wanted.push((line[0], format!("slack {}, {name}", points[0].label()), color));
        let rest = if color == BLUE { 1.. } else { points.len().. };
        wanted.extend(rest.clone().zip(&points[rest]).map(|(i, point)| (line[i], point.label(), color)));
    }
    for (name, at) in others {
        let (at, color) =
            (chart.backend_coord(&at), if name.starts_with("PyTorch") { RGBColor(200, 80, 10) } else { GREY });
        root.draw(&TriangleMarker::new(at, 6, color.filled()))?;
        take_line(&mut taken, at, at);
        wanted.push((at, name.to_owned(), color));
    }
    for (at, label, color) in wanted {
        let place = place(&mut taken, at, &label);
        let (to, side) = place.ok_or_else(|| format!("no room for the label '{label}'"))?;
        if (to.1 - at.1).abs() > TEXT {
            root.draw(&PathElement::new([at, to], color.mix(0.5).stroke_width(1)))?;
        }
        root.draw(&Text::new(label, to, text(color).pos(Pos::new(side, VPos::Center))))?;
    }
    Ok(root.present()?)
}

fn run(out: Option<&Path>) -> Result<(), Box<dyn Error>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/traces");
    let traces = TRACES.map(|name| Trace::read(format!("{folder}/{name}.csv.gz")));
    let traces = traces.into_iter().collect::<Result<Vec<_>, _>>()?;
    println!("peak reserved / peak allocated and driver time in ms, {} traces, expandable segments", traces.len());
    println!("{:<16}{:^32}{:^32}", "", "first pass", "second pass (ratios: of both)");
    println!("{:<16}{1:>10}{2:>10}{3:>12}{1:>10}{2:>10}{3:>12}", "slack", "mean", "worst", "ms");
    let points = SLACKS.iter().map(|slack| Point::new(&traces, *slack)).collect::<Result<Vec<_>, _>>()?;
    for point in &points {
        let cells = point.passes.map(|(mean, worst, ms)| format!("{mean:>10.4}{worst:>10.4}{ms:>12.1}"));
        println!("{:<16}{}", point.label(), cells.concat());
    }
    for conf in ["segments:expandable", "segments:fixed"] {
        println!("\n{conf}, else the defaults\n{:<16}{1:>20}{2:>12}{1:>20}{2:>12}", "trace", "ratio", "ms");
        for trace in &traces {
            let cells = replay(trace, conf)?.map(|(ratio, ms)| format!("{ratio:>20.4}{ms:>12.1}"));
            println!("{:<16}{}", trace.name, cells.concat());
        }
    }
    if let Some(out) = out {
        let mut svg = String::new();
        draw(&points, &mut svg)?;
        std::fs::write(out, svg).map_err(|e| format!("{}: cannot be written: {e}", out.display()))?;
        println!("\n{} written", out.display());
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let result = match arguments.iter().map(|argument| argument.to_str()).collect::<Vec<_>>()[..] {
        [Some("-h" | "--help")] => {
            println!("{USAGE}");
            Ok(())
        }
        [] => run(None),
        [Some("-o"), _] => run(Some(Path::new(&arguments[1]))),
        _ => Err(format!("not understood: {arguments:?}\n{USAGE}").into()),
    };
    result.map_or_else(
        |e| {
            eprintln!("slack_curve: {e}");
            ExitCode::from(2)
        },
        |()| ExitCode::SUCCESS,
    )
}
