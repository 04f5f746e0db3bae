//! The layers of a simulated model: those of a transformer, an embedding, blocks of seven layers, and a head.

/// A layer, with its weights in the totals of all layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Module {
    pub(super) name: String,
    pub(super) activations: u64,
    pub(super) parameters: u64,
    pub(super) time: u64,
}

/// The layers of a block: activations, parameters and time, relative to each other.
const BLOCK: [(&str, u64, u64, u64); 7] = [
    ("input_norm", 4, 0, 2),
    ("attention.qkv", 12, 12, 12),
    ("attention.core", 10, 0, 20),
    ("attention.out", 4, 4, 5),
    ("post_norm", 4, 0, 2),
    ("mlp.up", 16, 16, 16),
    ("mlp.down", 5, 16, 16),
];

pub(super) const FIRST_OF_BLOCK: &str = "input_norm";
pub(super) const LAST_OF_BLOCK: &str = "mlp.down";

/// The layers of a model, in the order of the forward pass.
pub(super) fn modules(count: usize) -> Vec<Module> {
    let module = |name: String, (activations, parameters, time)| Module { name, activations, parameters, time };
    let inner = (0..count.saturating_sub(2)).map(|n| {
        let (name, activations, parameters, time) = BLOCK[n % BLOCK.len()];
        module(format!("layers.{}.{name}", n / BLOCK.len()), (activations, parameters, time))
    });
    let mut all = vec![module("embedding".to_owned(), (4, 60, 3))];
    all.extend(inner);
    all.push(module("head".to_owned(), (40, 60, 30)));
    all.truncate(count);
    all
}
