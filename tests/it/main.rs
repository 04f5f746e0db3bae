//! Integration tests: the built program among real programs that people run with it. One binary, one module a topic.
//!
//! A test that needs another program, a peer, is ignored except in `make test-peers`. If a peer is missing (`tools`),
//! the test is skipped with a visible message, or fails if `CI` is set. Nothing listens on a fixed port, and no test
//! waits for longer than its condition takes.

// Shared helpers.
mod advise;
mod alertmanager;
mod authority;
mod browser;
mod buildah;
mod collector;
mod control_group;
mod crowd;
mod daemon;
mod http_server;
mod libraries;
mod process;
mod relay;
mod scraper;
mod terminal;
mod tools;

// The tests.
mod alerts;
mod annotations;
mod bombs;
mod captures;
mod cluster;
mod command_line;
mod connections;
mod container;
mod dashboards;
mod documents;
mod ends;
mod fake_nvml;
mod findings;
mod helm;
mod hostile;
mod hour;
mod house;
mod kubelet;
mod lanes;
mod layers;
mod lifecycle;
mod live_page;
mod live_stream;
mod memory;
mod nvml_source;
mod openapi;
mod otlp;
mod otlp_peers;
mod panels;
mod prometheus;
mod python_client;
mod quantiles;
mod recording;
mod recordings;
mod replay;
mod report;
mod report_page;
mod settings;
mod slow_disk;
mod slurm;
mod snapshots;
mod spikes;
mod top;
mod traces;
mod web_config;
