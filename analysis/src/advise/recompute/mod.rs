//! Which of ONNX Runtime's recompute plans to enable so that a job needs less memory by a given amount.
//!
//! Enters: a training log of `ORTModule` (`plan_log`, with `plans` and their savings as an `expression`), and a need. Leaves:
//! the fewest plans that save it (`choose`), and the configuration that has them.

mod choose;
mod expression;
mod plan_log;
mod plans;

pub use choose::{Choice, ChooseError, Offer, choose};
pub use expression::{Dims, names};
pub use plan_log::{Log, read};
pub use plans::{Combination, Id, Plan, PlanError, Strategy, configured, listed};
