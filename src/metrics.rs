//! Figures for Prometheus.
//!
//! [`MetricsCollector`] goes into a registry of the `prometheus-client` crate, [`text`] is the whole of an answer to a
//! scrape. Names end in their units; labels are bounded: a device, a size class, a driver's function, and the tags that
//! hold most. Streams are none: a program may make any number of them
//! ([`MemoryBreakdown`] has them).
//!
//! | metric | labels | |
//! | --- | --- | --- |
//! | `vramalloc_allocated_bytes`, `_active_`, `_requested_`, `_reserved_`, `_inactive_split_` | device, pool | gauges |
//! | `vramalloc_peak_allocated_bytes`, `vramalloc_peak_reserved_bytes` | device | gauges, since the last reset |
//! | `vramalloc_live_allocations`, `vramalloc_segments` | device, pool | gauges |
//! | `vramalloc_limit_bytes`, `vramalloc_device_free_bytes`, `vramalloc_device_memory_bytes` | device | gauges |
//! | `vramalloc_tag_allocated_bytes` | device, tag | gauge; while a history is recorded |
//! | `vramalloc_allocations_total`, `vramalloc_frees_total`, `vramalloc_out_of_memory_total`, `vramalloc_retries_total`, `vramalloc_host_waits_total` | device | counters |
//! | `vramalloc_driver_calls_total`, `vramalloc_driver_time_seconds_total` | device, call | counters |

use crate::allocator::WeakAllocator;
use crate::driver::Call;
use crate::history::OTHER;
use crate::{CachingAllocator, MemoryBreakdown, MemoryStats, StatArray};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use std::fmt;

/// Tags with a series of their own, a device; the others are one, `(other tags)`.
pub const TAGS_MAX: usize = 20;

/// Collects the figures of allocators at every scrape. Keeps none of them alive; those that are gone have no series.
#[derive(Debug)]
pub struct MetricsCollector {
    allocators: Vec<WeakAllocator>,
}

impl MetricsCollector {
    /// A collector of these allocators, one a device.
    #[must_use]
    pub fn new<'a>(allocators: impl IntoIterator<Item = &'a CachingAllocator>) -> Self {
        Self { allocators: allocators.into_iter().map(CachingAllocator::downgrade).collect() }
    }
}

/// The figures of these allocators in Prometheus's text format (OpenMetrics), as a scrape's whole answer: content type
/// `application/openmetrics-text; version=1.0.0; charset=utf-8`.
#[must_use]
pub fn text<'a>(allocators: impl IntoIterator<Item = &'a CachingAllocator>) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(MetricsCollector::new(allocators)));
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
    text
}

/// One device at the moment of the scrape.
struct Scrape {
    device: String,
    allocator: CachingAllocator,
    stats: MemoryStats,
}

impl Collector for MetricsCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let scrapes: Vec<Scrape> = self
            .allocators
            .iter()
            .filter_map(WeakAllocator::upgrade)
            .map(|allocator| Scrape {
                device: allocator.device().to_string(),
                stats: allocator.memory_stats(),
                allocator,
            })
            .collect();
        by_class(&scrapes, &mut encoder)?;
        by_device(&scrapes, &mut encoder)?;
        by_tag(&scrapes, &mut encoder)?;
        counters(&scrapes, &mut encoder)?;
        driver_calls(&scrapes, &mut encoder)
    }
}

fn gauge(value: u64) -> ConstGauge<i64> {
    ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX))
}

/// One metric with its series.
fn metric<M: EncodeMetric, const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    unit: Option<&Unit>,
    kind: MetricType,
    series: impl IntoIterator<Item = ([(&'static str, String); N], M)>,
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, unit, kind)?;
    for (labels, value) in series {
        value.encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn by_class(scrapes: &[Scrape], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    type Of = fn(&MemoryStats) -> &StatArray;
    let arrays: [(&str, &str, Option<&Unit>, Of); 7] = [
        ("vramalloc_allocated", "In blocks that users hold", Some(&Unit::Bytes), |stats| &stats.allocated_bytes),
        ("vramalloc_active", "In blocks that users or queued work hold", Some(&Unit::Bytes), |stats| {
            &stats.active_bytes
        }),
        ("vramalloc_requested", "Asked for, before rounding", Some(&Unit::Bytes), |stats| &stats.requested_bytes),
        ("vramalloc_reserved", "Held of the device", Some(&Unit::Bytes), |stats| &stats.reserved_bytes),
        ("vramalloc_inactive_split", "Free in fixed segments partly in use", Some(&Unit::Bytes), |stats| {
            &stats.inactive_split_bytes
        }),
        ("vramalloc_live_allocations", "Blocks that users hold", None, |stats| &stats.allocation),
        ("vramalloc_segments", "Fixed segments", None, |stats| &stats.segment),
    ];
    for (name, help, unit, of) in arrays {
        let series = scrapes.iter().flat_map(|scrape| {
            let array = of(&scrape.stats);
            [("large", array.large_pool), ("small", array.small_pool)].map(|(pool, stat)| {
                ([("device", scrape.device.clone()), ("pool", pool.to_owned())], gauge(stat.current))
            })
        });
        metric(encoder, (name, help), unit, MetricType::Gauge, series)?;
    }
    Ok(())
}

fn by_device(scrapes: &[Scrape], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    type Of = fn(&Scrape) -> Option<u64>;
    let gauges: [(&str, &str, Of); 5] = [
        ("vramalloc_peak_allocated", "Highest allocated since the peaks were reset", |scrape| {
            Some(scrape.stats.allocated_bytes.all.peak)
        }),
        ("vramalloc_peak_reserved", "Highest reserved since the peaks were reset", |scrape| {
            Some(scrape.stats.reserved_bytes.all.peak)
        }),
        ("vramalloc_limit", "Most that may be reserved", |scrape| scrape.allocator.limit()),
        ("vramalloc_device_free", "Free on the device, as the driver says", |scrape| {
            scrape.allocator.mem_get_info().ok().map(|info| info.free_bytes)
        }),
        ("vramalloc_device_memory", "Memory of the device", |scrape| {
            Some(scrape.allocator.driver().capabilities().total_bytes)
        }),
    ];
    for (name, help, of) in gauges {
        let series =
            scrapes.iter().filter_map(|scrape| Some(([("device", scrape.device.clone())], gauge(of(scrape)?))));
        metric(encoder, (name, help), Some(&Unit::Bytes), MetricType::Gauge, series)?;
    }
    Ok(())
}

fn by_tag(scrapes: &[Scrape], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let mut series = Vec::new();
    for scrape in scrapes.iter().filter(|scrape| scrape.allocator.is_recording_history()) {
        let MemoryBreakdown { tags, .. } = scrape.allocator.memory_breakdown();
        let mut others = 0;
        let mut room = TAGS_MAX;
        for usage in &tags {
            // What the history itself could not tell apart is in the same series, of which there is one.
            if room > 0 && *usage.tag != *OTHER {
                room -= 1;
                let labels = [("device", scrape.device.clone()), ("tag", usage.tag.to_string())];
                series.push((labels, gauge(usage.allocated)));
            } else {
                others += usage.allocated;
            }
        }
        if others > 0 {
            let labels = [("device", scrape.device.clone()), ("tag", OTHER.to_owned())];
            series.push((labels, gauge(others)));
        }
    }
    let name = ("vramalloc_tag_allocated", "In blocks that users hold, by the scope they were allocated in");
    metric(encoder, name, Some(&Unit::Bytes), MetricType::Gauge, series)
}

fn counters(scrapes: &[Scrape], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    type Of = fn(&MemoryStats) -> u64;
    let counters: [(&str, &str, Of); 5] = [
        ("vramalloc_allocations", "Blocks handed out", |stats| stats.allocation.all.allocated),
        ("vramalloc_frees", "Blocks freed by users", |stats| stats.allocation.all.freed),
        ("vramalloc_out_of_memory", "Requests that could not be served", |stats| stats.num_ooms),
        ("vramalloc_retries", "Requests served only after the cache was emptied", |stats| stats.num_alloc_retries),
        ("vramalloc_host_waits", "Times the host waited for queued work", |stats| stats.num_sync_all_streams),
    ];
    for (name, help, of) in counters {
        let series = scrapes
            .iter()
            .map(|scrape| ([("device", scrape.device.clone())], ConstCounter::new(of(&scrape.stats))));
        metric(encoder, (name, help), None, MetricType::Counter, series)?;
    }
    Ok(())
}

#[allow(clippy::cast_precision_loss)]
fn driver_calls(scrapes: &[Scrape], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let mut counts = Vec::new();
    let mut seconds = Vec::new();
    for scrape in scrapes {
        let calls = scrape.allocator.driver().calls();
        for &call in Call::ALL {
            let count = calls.get(call);
            if count.calls > 0 {
                let labels = [("device", scrape.device.clone()), ("call", call.name().to_owned())];
                counts.push((labels.clone(), ConstCounter::new(count.calls)));
                seconds.push((labels, ConstCounter::new(count.nanos as f64 / 1e9)));
            }
        }
    }
    metric(encoder, ("vramalloc_driver_calls", "Calls to the driver"), None, MetricType::Counter, counts)?;
    let name = ("vramalloc_driver_time", "Time in calls to the driver");
    metric(encoder, name, Some(&Unit::Seconds), MetricType::Counter, seconds)
}
