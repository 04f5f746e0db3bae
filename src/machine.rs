//! What this machine is called.

/// The machine's own name.
#[must_use]
pub fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// What Kubernetes calls this node (`NODE_NAME`, which the chart sets), or else the machine's own name.
#[must_use]
pub fn node_name() -> Option<String> {
    std::env::var("NODE_NAME").ok().filter(|name| !name.is_empty()).or_else(host_name)
}
