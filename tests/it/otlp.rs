//! OTLP to receivers inside these tests: both protocols, agreement with the exposition, raw points, spans, outages.

mod agreement;
mod bench;
mod collector;
mod found;
mod hostile;
mod outages;
mod process;
mod stories;
mod ticks;
mod tls;
mod wire;
