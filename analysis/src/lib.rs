//! Reports on recordings and on files of other tools, and advice for jobs.
//!
//! The registry in `formats` recognizes every file. [`import`] reads files of other tools, [`replay`] opens those with memory
//! over time as recordings, [`kineto`] reads traces of PyTorch's profiler, [`timeline`]
//! computes what GPUs did in them, [`report`] shows all of them, and [`advise`] computes
//! what to change. [`viewer`] is the chart that all pages share. Absent on purpose: threads, sockets and settings.

#![forbid(unsafe_code)]

pub mod advise;
mod formats;
pub mod html;
pub mod import;
pub mod kineto;
mod log_lines;
pub mod replay;
pub mod report;
pub mod timeline;
pub mod viewer;
