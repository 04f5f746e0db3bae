//! The running processes of a device.

use crate::control::Process;
use crate::functions::Function;
use crate::handle::{Answer, INSUFFICIENT_SIZE, INVALID_ARGUMENT, Target, on_device, put};
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlProcessInfo_t};

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: nvmlDevice_t,
    count: *mut u32,
    infos: *mut nvmlProcessInfo_t,
) -> u32 {
    on_device(Function::nvmlDeviceGetComputeRunningProcesses_v3, device, |target| {
        list(&running(target, |process| process.compute), target.gpu.long_processes, count, infos)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    device: nvmlDevice_t,
    count: *mut u32,
    infos: *mut nvmlProcessInfo_t,
) -> u32 {
    on_device(Function::nvmlDeviceGetGraphicsRunningProcesses_v3, device, |target| {
        list(&running(target, |process| process.graphics), target.gpu.long_processes, count, infos)
    })
}

/// A MIG instance has its own processes; a GPU has its own and those of its instances.
fn running(target: &Target<'_>, kind: impl Fn(&Process) -> bool) -> Vec<nvmlProcessInfo_t> {
    let mut infos = Vec::new();
    let mut add = |processes: &[Process], (gpu_instance, compute_instance): (u32, u32)| {
        infos.extend(processes.iter().filter(|process| kind(process)).map(|process| nvmlProcessInfo_t {
            pid: process.pid,
            usedGpuMemory: process.used.unwrap_or(u64::MAX),
            gpuInstanceId: gpu_instance,
            computeInstanceId: compute_instance,
        }));
    };
    match target.mig {
        Some(mig) => add(&mig.processes, (mig.gpu_instance, mig.compute_instance)),
        None => {
            add(&target.gpu.processes, (u32::MAX, u32::MAX));
            for mig in target.gpu.mig.iter().flatten() {
                add(&mig.processes, (mig.gpu_instance, mig.compute_instance));
            }
        }
    }
    infos
}

fn list(infos: &[nvmlProcessInfo_t], are_long: bool, count: *mut u32, to: *mut nvmlProcessInfo_t) -> Answer {
    if count.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: not null, and the caller has set the room of its array.
    let room = unsafe { *count } as usize;
    put(count, u32::try_from(infos.len()).map_err(|_| INVALID_ARGUMENT)?)?;
    if infos.len() > room {
        return Err(INSUFFICIENT_SIZE);
    }
    if infos.is_empty() {
        return Ok(());
    }
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    if are_long {
        for (place, info) in infos.iter().enumerate() {
            let long = Long { info: *info, protected_bytes: 0 };
            // SAFETY: not null, and a caller who knows of these has room for them all.
            unsafe { to.cast::<Long>().add(place).write(long) };
        }
        return Ok(());
    }
    // The library may write the rest of the array as well.
    // SAFETY: not null, and the caller's array has this room.
    unsafe { std::ptr::write_bytes(to, 0, room) };
    // SAFETY: not null, and the caller's array has room for them all.
    unsafe { std::ptr::copy_nonoverlapping(infos.as_ptr(), to, infos.len()) };
    Ok(())
}

/// The structure of drivers from 535.43 to 535.86.
#[repr(C)]
struct Long {
    info: nvmlProcessInfo_t,
    protected_bytes: u64,
}
