//! The stories: the built program among the real programs that people run it with. One binary, one module a story.
//!
//! A story that needs a peer is ignored but for `make test-peers`. What it needs and a machine lacks (`tools`) skips it
//! loudly, and fails it where `CI` is set. Nothing listens on a
//! fixed port, and nothing waits for longer than what it waits for.

// What stories share.
mod alertmanager;
mod authority;
mod collector;
mod crowd;
mod daemon;
mod http_server;
mod process;
mod relay;
mod scraper;
mod tools;

// The stories.
mod alerts;
mod annotations;
mod bombs;
mod captures;
mod connections;
mod container;
mod dashboards;
mod ends;
mod fake_nvml;
mod findings;
mod helm;
mod hostile;
mod house;
mod kubelet;
mod lanes;
mod lifecycle;
mod nvml_source;
mod otlp;
mod otlp_peers;
mod prometheus;
mod recordings;
mod replay;
mod settings;
mod spikes;
mod web_config;
