//! What highwater finds in files: reports of recordings, of traces and logs of other tools, and advice for jobs.
//!
//! Every file is recognized by the registry in `formats`. [`replay`] makes a recording of what [`import`] reads of other tools,
//! [`kineto`] reads traces of PyTorch's profiler, [`report`] shows either, and [`advise`] says what to change. [`viewer`] is the
//! chart that pages share. Absent on purpose: anything that runs while a job trains.

pub mod advise;
mod formats;
pub mod html;
pub mod import;
pub mod kineto;
mod log_lines;
pub mod replay;
pub mod report;
pub mod viewer;
