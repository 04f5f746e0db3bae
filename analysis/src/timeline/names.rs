//! Names that occur many times, kept once.
//!
//! Invariant: at most [`MOST_NAME_BYTES`] bytes in all.

use super::MOST_NAME_BYTES;
use std::borrow::Cow;
use std::collections::HashMap;
use std::rc::Rc;

/// The most bytes of the name of a kernel, and the most different names of kernels. Templates make names of kilobytes, whose
/// begin says what they compute.
const MOST_KERNEL_NAME: usize = 200;
const MOST_KERNELS: usize = 1_000;

/// Different names, numbered in the order in which they were first seen.
#[derive(Debug, Clone, Default)]
pub(super) struct Names {
    numbers: HashMap<Rc<str>, u32>,
    names: Vec<Rc<str>>,
    bytes: usize,
}

impl Names {
    /// The number of a name; `None` if there is no room for it.
    pub(super) fn intern(&mut self, name: &str) -> Option<u32> {
        if let Some(number) = self.numbers.get(name) {
            return Some(*number);
        }
        // The empty name counts no bytes, but it can be added only once.
        if self.bytes + name.len() > MOST_NAME_BYTES {
            return None;
        }
        self.bytes += name.len();
        let (name, number) = (Rc::<str>::from(name), u32::try_from(self.names.len()).ok()?);
        self.numbers.insert(Rc::clone(&name), number);
        self.names.push(name);
        Some(number)
    }

    /// The number of a kernel's name, without the list of its arguments; `None` if there is no room for it.
    pub(super) fn intern_kernel(&mut self, name: &str) -> Option<u32> {
        self.intern_short(&kernel_name(name))
    }

    /// The number of a name, of which only the begin is kept; `None` if there is no room for it.
    pub(super) fn intern_short(&mut self, name: &str) -> Option<u32> {
        let name = begin_of(name);
        let is_new = self.names.len() >= MOST_KERNELS && !self.numbers.contains_key(name);
        if is_new { None } else { self.intern(name) }
    }

    /// The name with a number.
    pub(super) fn get(&self, number: u32) -> Option<&str> {
        self.names.get(usize::try_from(number).ok()?).map(|name| &**name)
    }
}

/// The part of a kernel's name that differs from others: without the type that it returns, the namespaces of PyTorch, and the list of its
/// arguments, which is the last one outside of `<>`.
fn kernel_name(name: &str) -> Cow<'_, str> {
    // Of a copy, the brackets say from where to where.
    if name.starts_with("Mem") {
        return begin_of(name).into();
    }
    let name = name.strip_prefix("void ").unwrap_or(name);
    let name = without_arguments(name);
    if !name.contains("::") {
        return begin_of(name).into();
    }
    let short = name.replace("(anonymous namespace)::", "").replace("at::native::", "");
    // A name that was cut behind its namespaces is better than none.
    begin_of(if short.is_empty() { name } else { &short }).to_owned().into()
}

/// A name without the brackets at its end.
fn without_arguments(name: &str) -> &str {
    if !name.ends_with(')') {
        return name;
    }
    let mut depth = 0_u32;
    let begin = name.bytes().rposition(|byte| {
        depth = match byte {
            b')' => depth + 1,
            b'(' => depth.saturating_sub(1),
            _ => depth,
        };
        depth == 0
    });
    begin.filter(|at| *at > 0).map_or(name, |at| &name[..at])
}

/// The begin of a name that is too long.
fn begin_of(name: &str) -> &str {
    let end = (0..=MOST_KERNEL_NAME.min(name.len())).rev().find(|end| name.is_char_boundary(*end));
    &name[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_kernel_the_name_is_kept_and_not_what_it_takes() {
        for (name, expected) in [
            (
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            ),
            ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n"),
            (
                "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::Lambda(float)>(at::Metadata<4>, int)",
                "multi_tensor_apply_kernel<at::Lambda(float)>",
            ),
            ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
            ("void f<1>", "f<1>"),
            ("k(float*, void (*)(int))", "k"),
            ("Functor::operator<(int)", "Functor::operator<"),
            ("void at::native::", "at::native::"),
            ("(x)", "(x)"),
            ("", ""),
        ] {
            assert_eq!(kernel_name(name), expected, "{name}");
        }
        assert_eq!(kernel_name(&"é".repeat(MOST_KERNEL_NAME)).len(), MOST_KERNEL_NAME);
    }

    #[test]
    fn more_kernels_than_are_kept_cost_those_before_nothing() {
        let mut names = Names::default();
        let kept = (0..2 * MOST_KERNELS).filter(|nth| names.intern_kernel(&format!("k{nth}(int)")).is_some()).count();
        assert_eq!((kept, names.intern_kernel("k7(float)")), (MOST_KERNELS, Some(7)));
    }

    #[test]
    fn a_name_is_kept_once_and_too_many_are_refused() {
        let mut names = Names::default();
        assert_eq!((names.intern("a"), names.intern("b"), names.intern("a")), (Some(0), Some(1), Some(0)));
        assert_eq!((names.get(1), names.get(2)), (Some("b"), None));
        assert_eq!(names.intern(&"x".repeat(MOST_NAME_BYTES - 1)), None);
        assert_eq!(names.intern(&"x".repeat(MOST_NAME_BYTES - 2)), Some(2));
        assert_eq!((names.intern("c"), names.intern("b")), (None, Some(1)));
    }
}
