//! The figures for Prometheus, and the dashboard that draws them.
#![cfg(feature = "metrics")]

use std::collections::BTreeMap;
use vramalloc::driver::Driver;
use vramalloc::driver::sim::{SimDriver, SimMachine};
use vramalloc::metrics::{self, TAGS_MAX};
use vramalloc::{Allocators, CachingAllocator, Config, HistoryOptions, Limit, StreamHandle};

const MIB: u64 = 1 << 20;

/// Series by name and labels; comments aside.
fn parsed(text: &str) -> BTreeMap<String, f64> {
    assert!(text.ends_with("# EOF\n"), "the format wants an end");
    let mut all = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let before = all.insert(series.to_owned(), value.parse().unwrap());
        assert_eq!(before, None, "{series} is there twice");
    }
    all
}

fn name(series: &str) -> &str {
    series.split('{').next().unwrap()
}

#[test]
fn the_figures_are_the_statistics() {
    let machine = SimMachine::new(2, &SimDriver::builder().capacity(64 * MIB));
    let drivers = (0..2).map(|ordinal| machine.device(ordinal) as std::sync::Arc<dyn Driver>);
    let allocators = Allocators::new(drivers, &Config::default()).unwrap();
    let stream = allocators.stream(1, StreamHandle::DEFAULT).unwrap();
    let a = allocators.alloc(30 * MIB, &stream).unwrap();
    let b = allocators.alloc(1000, &stream).unwrap();
    drop(allocators.alloc(2000, &stream).unwrap());
    let _oom = allocators.alloc(100 * MIB, &stream).unwrap_err();
    let text = metrics::text(&allocators);
    let series = parsed(&text);
    let stats = allocators.get(1).unwrap().memory_stats();
    for (key, value) in [
        ("vramalloc_allocated_bytes{device=\"1\",pool=\"large\"}", stats.allocated_bytes.large_pool.current),
        ("vramalloc_allocated_bytes{device=\"1\",pool=\"small\"}", stats.allocated_bytes.small_pool.current),
        ("vramalloc_allocated_bytes{device=\"0\",pool=\"large\"}", 0),
        ("vramalloc_reserved_bytes{device=\"1\",pool=\"large\"}", 30 * MIB),
        ("vramalloc_requested_bytes{device=\"1\",pool=\"small\"}", 1000),
        ("vramalloc_live_allocations{device=\"1\",pool=\"small\"}", 1),
        ("vramalloc_peak_reserved_bytes{device=\"1\"}", stats.reserved_bytes.all.peak),
        ("vramalloc_device_memory_bytes{device=\"1\"}", 64 * MIB),
        ("vramalloc_device_free_bytes{device=\"1\"}", 32 * MIB),
        ("vramalloc_allocations_total{device=\"1\"}", 3),
        ("vramalloc_frees_total{device=\"1\"}", 1),
        ("vramalloc_out_of_memory_total{device=\"1\"}", 1),
        ("vramalloc_driver_calls_total{device=\"1\",call=\"cuMemAlloc\"}", 2),
    ] {
        #[allow(clippy::cast_precision_loss)]
        let value = value as f64;
        assert_eq!(series.get(key), Some(&value), "{key}:\n{text}");
    }
    assert!(series["vramalloc_driver_time_seconds_total{device=\"1\",call=\"cuMemAlloc\"}"] > 0.0);
    assert!(!series.keys().any(|key| key.starts_with("vramalloc_limit_bytes")), "there is no limit");
    assert!(!series.keys().any(|key| key.starts_with("vramalloc_tag")), "no history is recorded");
    drop((a, b));
}

#[test]
fn tags_are_bounded() {
    let sim = SimDriver::builder().capacity(64 * MIB).build();
    let allocator = CachingAllocator::new(sim, Config::default().limit(Limit::Bytes(32 * MIB))).unwrap();
    allocator.record_history(Some(HistoryOptions::default().events(0))).unwrap();
    let stream = allocator.default_stream().unwrap();
    let mut live = Vec::new();
    for number in 0..100u64 {
        let _scope = allocator.scope(&format!("layer \"{number}\""));
        live.push(allocator.alloc(512 * (1 + number), &stream).unwrap());
    }
    let series = parsed(&metrics::text([&allocator]));
    let tags: Vec<(&String, &f64)> =
        series.iter().filter(|(key, _)| name(key) == "vramalloc_tag_allocated_bytes").collect();
    assert_eq!(tags.len(), TAGS_MAX + 1);
    #[allow(clippy::cast_precision_loss)]
    let all = allocator.memory_allocated() as f64;
    assert_eq!(tags.iter().map(|(_, bytes)| **bytes).sum::<f64>(), all, "none is lost");
    assert!(series.contains_key(r#"vramalloc_tag_allocated_bytes{device="0",tag="layer \"99\""}"#), "{tags:?}");
    #[allow(clippy::cast_precision_loss)]
    let limit = (32 * MIB) as f64;
    assert_eq!(series["vramalloc_limit_bytes{device=\"0\"}"], limit);
}

/// The history itself calls what it cannot tell apart by the name that the bounded series has.
#[test]
fn the_other_tags_are_one_series() {
    let sim = SimDriver::builder().capacity(64 * MIB).build();
    let allocator = CachingAllocator::new(sim, Config::default()).unwrap();
    allocator.record_history(Some(HistoryOptions::default().events(0))).unwrap();
    let stream = allocator.default_stream().unwrap();
    let mut live = Vec::new();
    let names = (0..30u64).map(|number| format!("layer {number}")).chain(["(other tags)".to_owned()]);
    for (number, name) in (0..).zip(names) {
        let _scope = allocator.scope(&name);
        live.push(allocator.alloc(512 * (1 + number), &stream).unwrap());
    }
    let series = parsed(&metrics::text([&allocator]));
    let tags = series.iter().filter(|(key, _)| name(key) == "vramalloc_tag_allocated_bytes");
    assert_eq!(tags.clone().count(), TAGS_MAX + 1);
    #[allow(clippy::cast_precision_loss)]
    let all = allocator.memory_allocated() as f64;
    assert_eq!(tags.map(|(_, bytes)| *bytes).sum::<f64>(), all, "none is lost");
}

#[test]
fn a_collector_keeps_nothing_alive() {
    let sim = SimDriver::builder().capacity(64 * MIB).build();
    let allocator = CachingAllocator::new(sim, Config::default()).unwrap();
    let mut registry = prometheus_client::registry::Registry::default();
    registry.register_collector(Box::new(metrics::MetricsCollector::new([&allocator])));
    let encode = || {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    };
    assert!(encode().contains("vramalloc_reserved_bytes{"));
    drop(allocator);
    assert!(!encode().contains("vramalloc_reserved_bytes{"));
}

/// Every metric that the dashboard asks for is one that there is.
#[test]
fn the_dashboard_asks_for_what_there_is() {
    let dashboard: serde_json::Value =
        serde_json::from_str(include_str!("../docs/grafana-dashboard.json")).unwrap();
    let sim = SimDriver::builder().capacity(64 * MIB).build();
    let allocator = CachingAllocator::new(sim, Config::default().limit(Limit::Bytes(32 * MIB))).unwrap();
    allocator.record_history(Some(HistoryOptions::default().events(0))).unwrap();
    let stream = allocator.default_stream().unwrap();
    let _live = allocator.alloc(1000, &stream).unwrap();
    let series = parsed(&metrics::text([&allocator]));
    let there: std::collections::BTreeSet<&str> = series.keys().map(|key| name(key)).collect();
    let mut asked = std::collections::BTreeSet::new();
    let mut queries = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            queries += 1;
            let query = target["expr"].as_str().unwrap();
            for word in query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
                if word.starts_with("vramalloc_") {
                    asked.insert(word.to_owned());
                }
            }
        }
    }
    assert!(queries >= 8);
    for metric in &asked {
        assert!(there.contains(metric.as_str()), "{metric} is not there: {there:?}");
    }
    assert!(asked.len() >= 10, "{asked:?}");
}
