//! Collectives: which kind a kernel is, how large its message is, and what its bandwidth is compared with.
//!
//! Enters: a kernel's name, and what PyTorch wrote about the collective, if it did. Leaves: its kind and its bytes.
//! Invariant: what is not one of the known names is [`Kind::Unknown`], not the likeliest kind.

use serde::Serialize;

/// A kind of collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    Barrier,
    /// Point to point: a send, a receive, or both in one kernel.
    SendRecv,
    /// A kernel of a communication library whose kind neither its name nor its metadata has.
    Unknown,
}

/// A collective on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collective {
    /// What it was.
    pub kind: Kind,
    /// When its kernel began, nanoseconds.
    pub begin_ns: i64,
    /// When its kernel ended, nanoseconds.
    pub end_ns: i64,
    /// When the host began to launch it, nanoseconds.
    pub launch_ns: Option<i64>,
    /// The GPU's number in its process.
    pub device: u32,
    /// Its message, bytes: the larger of what the rank put in and got out.
    pub bytes: Option<u64>,
    /// How many ranks take part.
    pub group_size: Option<u64>,
    /// Its number within its process group.
    pub sequence: Option<u64>,
    pub(crate) group: Option<u32>,
    pub(super) name: u32,
}

/// Names without case and punctuation. The order matters: the later ones are parts of the earlier ones.
const NAMED: [(&str, Kind); 12] = [
    ("allreduce", Kind::AllReduce),
    ("allgather", Kind::AllGather),
    ("reducescatter", Kind::ReduceScatter),
    ("alltoall", Kind::AllToAll),
    ("broadcast", Kind::Broadcast),
    ("barrier", Kind::Barrier),
    ("sendrecv", Kind::SendRecv),
    ("reduce", Kind::Reduce),
    ("gather", Kind::Gather),
    ("scatter", Kind::Scatter),
    ("send", Kind::SendRecv),
    ("recv", Kind::SendRecv),
];
/// Parts of the names of kernels of other libraries, such as vLLM, TensorRT-LLM and NVSHMEM, that move data between GPUs.
const ALIKE: [&str; 6] = ["allreduce", "allgather", "reducescatter", "alltoall", "crossdevicereduce", "nvshmem"];

impl Kind {
    /// The kind that a name says, such as `_allgather_base` or `ncclDevKernel_AllReduce_Sum_bf16_RING_LL(…)`.
    #[must_use]
    pub fn of(name: &str) -> Self {
        let bare = bare(name);
        NAMED.iter().find(|(known, _)| bare.contains(known)).map_or(Self::Unknown, |(_, kind)| *kind)
    }

    /// The factor of nccl-tests that turns algorithm bandwidth into bus bandwidth, which can be compared with the bandwidth of a
    /// link at any number of ranks. `None` if there is none for this kind.
    #[must_use]
    pub fn bus_factor(self, ranks: u64) -> Option<f64> {
        let n = ranks as f64;
        match self {
            _ if ranks == 0 => None,
            Self::AllReduce => Some(2.0 * (n - 1.0) / n),
            Self::AllGather | Self::ReduceScatter | Self::AllToAll | Self::Gather | Self::Scatter => {
                Some((n - 1.0) / n)
            }
            Self::Broadcast | Self::Reduce | Self::SendRecv => Some(1.0),
            Self::Barrier | Self::Unknown => None,
        }
    }

    /// Whether no rank can end before the last one began.
    #[must_use]
    pub fn waits_for_all(self) -> bool {
        matches!(self, Self::AllReduce | Self::AllGather | Self::ReduceScatter | Self::AllToAll | Self::Barrier)
    }
}

/// The letters of a name before its arguments, in lower case.
fn bare(name: &str) -> String {
    let name = name.split(['(', '<']).next().unwrap_or_default();
    name.chars().filter(char::is_ascii_alphanumeric).map(|letter| letter.to_ascii_lowercase()).collect()
}

/// Whether a kernel belongs to NCCL, RCCL or MSCCL, by its name. RCCL's kernels have NCCL's names.
pub(super) fn is_library_kernel(name: &str) -> bool {
    let name = name.split('(').next().unwrap_or_default().to_ascii_lowercase();
    ["nccl", "rccl", "msccl"].iter().any(|library| name.contains(library))
}

/// Whether a kernel's name looks like a collective of any other library.
pub(super) fn looks_like_one(name: &str) -> bool {
    let name = name.strip_prefix("void ").unwrap_or(name);
    let bare = bare(name);
    // What a block or a warp does among its own threads is no communication.
    let is_inside_gpu = bare.contains("block") || bare.contains("warp");
    !is_inside_gpu && ALIKE.iter().any(|known| bare.contains(known))
}

/// The bytes of one element of a type as PyTorch names it.
pub(crate) fn element_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        "Byte" | "Char" | "Bool" | "QInt8" | "QUInt8" => Some(1),
        "Short" | "Half" | "BFloat16" | "UInt16" => Some(2),
        "Int" | "Float" | "UInt32" | "QInt32" | "ComplexHalf" => Some(4),
        "Long" | "Double" | "UInt64" | "ComplexFloat" => Some(8),
        "ComplexDouble" => Some(16),
        _ => dtype.starts_with("Float8_").then_some(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_pytorch_and_of_kernels_say_the_kind() {
        for (name, kind) in [
            ("allreduce", Kind::AllReduce),
            ("allreduce_coalesced", Kind::AllReduce),
            ("_allgather_base", Kind::AllGather),
            ("all_gather_into_tensor_coalesced", Kind::AllGather),
            ("_reduce_scatter_base", Kind::ReduceScatter),
            ("all_to_allv", Kind::AllToAll),
            ("_broadcast_oop", Kind::Broadcast),
            ("_reduce_oop", Kind::Reduce),
            ("gather", Kind::Gather),
            ("scatter", Kind::Scatter),
            ("send", Kind::SendRecv),
            ("barrier", Kind::Barrier),
            ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Kind::AllReduce),
            ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, ncclWork*)", Kind::AllGather),
            ("ncclDevKernel_Reduce_Sum_f32_RING_LL(x)", Kind::Reduce),
            ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", Kind::SendRecv),
            ("ncclDevKernel_Generic_1(allreduce)", Kind::Unknown),
            ("mscclKernel_Sum_half_Simple_false(mscclAlgo*)", Kind::Unknown),
            ("coalesced", Kind::Unknown),
        ] {
            assert_eq!(Kind::of(name), kind, "{name}");
        }
    }

    #[test]
    fn kernels_of_libraries_and_lookalikes_are_told_from_computation() {
        for (name, library, alike) in [
            ("ncclDevKernel_Generic(x)", true, false),
            ("mscclKernel_Sum_half_Simple_false(x)", true, false),
            ("__amd_rocclr_copyBuffer.kd", false, false),
            ("void vllm::cross_device_reduce_1stage<__half, 2>(x)", false, true),
            ("void tensorrt_llm::oneShotAllReduceKernel<float>(x)", false, true),
            ("void blockAllReduceSum<float>(x)", false, false),
            ("void at::native::reduce_kernel<512, 1>(at::native::all_reduce)", false, false),
            ("sm90_xmma_gemm_bf16", false, false),
        ] {
            assert_eq!((is_library_kernel(name), looks_like_one(name)), (library, alike), "{name}");
        }
    }

    #[test]
    fn factors_are_those_of_nccl_tests() {
        for (kind, factor) in [
            (Kind::AllReduce, Some(1.75)),
            (Kind::AllGather, Some(0.875)),
            (Kind::AllToAll, Some(0.875)),
            (Kind::Broadcast, Some(1.0)),
            (Kind::SendRecv, Some(1.0)),
            (Kind::Barrier, None),
            (Kind::Unknown, None),
        ] {
            assert_eq!(kind.bus_factor(8), factor, "{kind:?}");
        }
        assert_eq!(Kind::AllReduce.bus_factor(0), None);
    }

    #[test]
    fn sizes_of_types_are_known_or_not() {
        let sizes = ["BFloat16", "Float", "Long", "Float8_e4m3fn", "Undefined", ""].map(element_bytes);
        assert_eq!(sizes, [Some(2), Some(4), Some(8), Some(1), None, None]);
    }
}
