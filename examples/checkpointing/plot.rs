//! The plot: peak against number of layers.

use crate::Row;
use crate::tensor::Result;
use plotters::prelude::*;
use std::path::Path;

pub fn draw(path: &str, rows: &[Row]) -> Result<()> {
    if let Some(folder) = Path::new(path).parent() {
        std::fs::create_dir_all(folder)?;
    }
    let (unit, name) = if rows[0].plain > 1 << 24 { (30, "GiB") } else { (20, "MiB") };
    let size = |bytes: u64| bytes as f64 / f64::from(1 << unit);
    let last = rows.last().ok_or("no rows")?;
    let area = SVGBackend::new(path, (720, 420)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(0..last.layers, 0.0..size(last.plain) * 1.05)?;
    chart.configure_mesh().x_desc("layers").y_desc(format!("peak of the activations, {name}")).draw()?;
    let plain = rows.iter().map(|row| (row.layers, size(row.plain)));
    chart
        .draw_series(LineSeries::new(plain, RED.stroke_width(2)))?
        .label("plain")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], RED));
    let checkpointed = rows.iter().map(|row| (row.layers, size(row.checkpointed)));
    chart
        .draw_series(LineSeries::new(checkpointed, BLUE.stroke_width(2)))?
        .label("a checkpoint every √n layers")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], BLUE));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()?;
    area.present()?;
    Ok(())
}
