//! Owns the border to the C++ shim: every `unsafe` of the engine is here, behind functions that are safe.
#![allow(unsafe_code, reason = "calls into the C++ shim; each checks its arguments on one side or the other")]

use std::ffi::{CStr, c_char, c_float, c_int, c_void};
use std::fs::File;
use std::marker::PhantomData;
use std::rc::Rc;

use memmap2::Mmap;
use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::EngineError;
use super::attention::plan::{AttentionPlan, Rest, Tile};
use super::matrix::{Blocks, Format, Matrix};

type Raw = *const C_tensor;

#[repr(C)]
struct RawPlan {
    tiles: *const Tile,
    tile_count: i64,
    rests: *const Rest,
    slots: *const u32,
}

#[repr(C)]
struct RawPart {
    packed: Raw,
    outputs: i64,
    format: c_int,
}

#[repr(C)]
struct RawRotation {
    cos: Raw,
    sin: Raw,
    q_norm: Raw,
    k_norm: Raw,
    eps: c_float,
}

unsafe extern "C" {
    safe fn dh_error() -> *const c_char;
    safe fn dh_kernels_name() -> *const c_char;
    safe fn dh_inference_mode_new() -> *mut c_void;
    fn dh_inference_mode_free(guard: *mut c_void);
    safe fn dh_set_flush_denormal(on: c_int) -> c_int;
    fn dh_load_cuda(library: *const c_char) -> c_int;
    safe fn dh_free_device_memory() -> i64;
    fn dh_linear_pack(weight: *const c_void, format: c_int, rows: i64, columns: i64) -> *mut C_tensor;
    fn dh_linear(x: Raw, parts: *const RawPart, count: i64, bias: Raw, wide: c_int) -> *mut C_tensor;
    fn dh_linear_rows(part: *const RawPart, columns: i64, ids: *const i64, count: i64) -> *mut C_tensor;
    safe fn dh_file_bytes(format: c_int, columns: i64) -> i64;
    fn dh_rms_norm(x: Raw, delta: Raw, weight: Raw, eps: c_float) -> *mut C_tensor;
    fn dh_gate_mul(gate_up: Raw, activation: c_int) -> *mut C_tensor;
    fn dh_attend(q: Raw, k: Raw, v: Raw, plan: *const RawPlan, window: i64, scale: c_float) -> *mut C_tensor;
    fn dh_rotate_store(
        qkv: Raw,
        k: Raw,
        v: Raw,
        rotation: *const RawRotation,
        positions: *const u32,
        slots: *const u32,
    ) -> *mut C_tensor;
    fn dh_to_host(from: Raw, out: *mut c_float, count: i64) -> c_int;
    fn dh_move_slots(pool: Raw, moves: *const u32, count: i64) -> c_int;
}

/// Switches this thread to libtorch's inference mode until dropped.
pub struct InferenceMode {
    guard: *mut c_void,
    /// The mode belongs to the thread that entered it.
    _not_send: PhantomData<*const ()>,
}

impl InferenceMode {
    pub fn enter() -> Self {
        Self { guard: dh_inference_mode_new(), _not_send: PhantomData }
    }
}

impl Drop for InferenceMode {
    fn drop(&mut self) {
        // SAFETY: made by `enter`, freed once.
        unsafe { dh_inference_mode_free(self.guard) }
    }
}

/// Treats denormal numbers as zero in this thread, and in the worker threads it starts afterwards.
pub fn flush_denormals() -> bool {
    dh_set_flush_denormal(1) != 0
}

/// The instruction set the CPU kernels run on.
pub fn kernels_name() -> &'static str {
    // SAFETY: a string literal of the shim.
    unsafe { CStr::from_ptr(dh_kernels_name()) }.to_str().unwrap_or("unknown")
}

/// Loads libtorch's CUDA backend into this process. Must come before anything asks whether CUDA is there:
/// libtorch answers that question once.
pub fn load_cuda() -> Result<(), String> {
    // SAFETY: a library of libtorch, whose initialisers register the backend and nothing else.
    match unsafe { dh_load_cuda(c"libtorch_cuda.so".as_ptr()) } {
        0 => Ok(()),
        _ => Err(error_text()),
    }
}

/// Free bytes of the current CUDA device.
pub fn free_device_memory() -> Option<u64> {
    u64::try_from(dh_free_device_memory()).ok()
}

/// A weight `[rows, columns]` laid out the way the kernels want it.
#[derive(Debug)]
pub struct Packed {
    data: Tensor,
    format: Format,
    rows: usize,
    columns: usize,
}

impl Packed {
    pub fn new(matrix: &Matrix) -> Result<Self, EngineError> {
        match matrix {
            Matrix::Plain(weight) => {
                let weight = weight.contiguous();
                let format = Format::plain(weight.kind()).filter(|_| weight.device() == Device::Cpu);
                require("packing a weight", format.is_some() && weight.dim() == 2)?;
                let [rows, columns] = [0, 1].map(|dim| weight.size()[dim] as usize);
                // SAFETY: a contiguous matrix of that type.
                unsafe { Self::pack(weight.data_ptr(), format.unwrap_or(Format::F32), rows, columns) }
            }
            Matrix::Blocks(Blocks { format, rows, columns, bytes }) => {
                let row = dh_file_bytes(*format as c_int, *columns as i64) as usize;
                require("packing blocks", row > 0 && bytes.len() == rows * row)?;
                // SAFETY: as many rows as there are bytes for.
                unsafe { Self::pack(bytes.as_ptr().cast(), *format, *rows, *columns) }
            }
        }
    }

    /// `weight` must point to that many rows, as a file has them.
    unsafe fn pack(
        weight: *const c_void,
        format: Format,
        rows: usize,
        columns: usize,
    ) -> Result<Self, EngineError> {
        // SAFETY: the caller's.
        let data = unsafe { dh_linear_pack(weight, format as c_int, rows as i64, columns as i64) };
        Ok(Self { data: take("packing a weight", data)?, format, rows, columns })
    }

    pub fn format(&self) -> Format {
        self.format
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn columns(&self) -> usize {
        self.columns
    }

    pub fn bytes(&self) -> u64 {
        self.data.numel() as u64
    }

    /// Some rows of a weight in blocks, `[ids, columns]` in bfloat16.
    pub fn gather(&self, ids: &[i64]) -> Result<Tensor, EngineError> {
        let plain = matches!(self.format, Format::F32 | Format::BF16);
        let fits = ids.iter().all(|&id| usize::try_from(id).is_ok_and(|id| id < self.rows));
        require("gathering rows", fits && !plain)?;
        // SAFETY: blocks, of which all those rows are there.
        take("gathering rows", unsafe {
            dh_linear_rows(&self.raw(), self.columns as i64, ids.as_ptr(), ids.len() as i64)
        })
    }

    fn raw(&self) -> RawPart {
        RawPart { packed: self.data.as_ptr(), outputs: self.rows as i64, format: self.format as c_int }
    }
}

/// `x` `[rows, in]` times packed weights, their outputs side by side; in float32 if `wide`.
pub fn linear(
    x: &Tensor,
    parts: &[Rc<Packed>],
    bias: Option<&Tensor>,
    wide: bool,
) -> Result<Tensor, EngineError> {
    let raw_parts: Vec<RawPart> = parts.iter().map(|part| part.raw()).collect();
    let outputs: usize = parts.iter().map(|part| part.rows).sum();
    let fits = x.dim() == 2
        && parts.iter().all(|part| part.columns == last_size(x))
        && bias.is_none_or(|bias| bias.size() == [outputs as i64]);
    require("linear", fits)?;
    // SAFETY: live tensors; packed sizes, types and layout are checked in the shim.
    take("linear", unsafe {
        dh_linear(x.as_ptr(), raw_parts.as_ptr(), raw_parts.len() as i64, raw(bias), wide.into())
    })
}

/// With `delta`, adds it to `x` in place first.
pub fn rms_norm(
    x: &Tensor,
    delta: Option<&Tensor>,
    weight: &Tensor,
    eps: f32,
) -> Result<Tensor, EngineError> {
    let width = last_size(x);
    let fits = x.dim() == 2 && weight.numel() == width && delta.is_none_or(|delta| delta.size() == x.size());
    require("rms_norm", fits)?;
    // SAFETY: shapes agree; type, layout and device are checked in the shim.
    take("rms_norm", unsafe { dh_rms_norm(x.as_ptr(), raw(delta), weight.as_ptr(), eps) })
}

/// What a gate goes through, by the shim's numbers.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activation {
    #[default]
    Silu = 0,
    /// The form of gelu that is made of tanh.
    GeluTanh = 1,
}

/// `activation(gate) * up` of `[rows, gate | up]`.
pub fn gate_mul(gate_up: &Tensor, activation: Activation) -> Result<Tensor, EngineError> {
    require("gate_mul", gate_up.dim() == 2 && last_size(gate_up).is_multiple_of(2))?;
    // SAFETY: as above.
    take("gate_mul", unsafe { dh_gate_mul(gate_up.as_ptr(), activation as c_int) })
}

/// How the CPU kernel turns a head, before it is stored or asked with.
pub struct Rotation<'a> {
    /// `[positions, head_dim / 2]`, float32.
    pub cos: &'a Tensor,
    pub sin: &'a Tensor,
    /// Norms over each head of the queries and of the keys.
    pub norms: Option<(&'a Tensor, &'a Tensor)>,
    pub eps: f32,
}

/// Rotates queries and keys, stores keys and values in the pool, and returns the queries `[rows, heads, dim]`.
pub fn rotate_store(
    qkv: &Tensor,
    pool: (&Tensor, &Tensor),
    rotation: &Rotation<'_>,
    plan: &AttentionPlan,
) -> Result<Tensor, EngineError> {
    let (positions, slots) = (plan.positions(), plan.new_slots());
    let (k, v) = pool;
    let head_dim = last_size(k);
    let tables = [head_dim as i64 / 2];
    let fits = k.dim() == 3
        && k.size() == v.size()
        && qkv.dim() == 2
        && qkv.size()[0] as usize == positions.len()
        && rotation.cos.size()[1..] == tables
        && rotation.sin.size() == rotation.cos.size()
        && rotation.norms.is_none_or(|(q, k)| q.numel() == head_dim && k.numel() == head_dim)
        && plan.fits(k.size()[1] as usize, rotation.cos.size()[0] as usize);
    require("rotate_store", fits)?;
    let raw_rotation = RawRotation {
        cos: rotation.cos.as_ptr(),
        sin: rotation.sin.as_ptr(),
        q_norm: raw(rotation.norms.map(|norms| norms.0)),
        k_norm: raw(rotation.norms.map(|norms| norms.1)),
        eps: rotation.eps,
    };
    // SAFETY: one position and one slot per row, all inside the tables and the pool.
    take("rotate_store", unsafe {
        dh_rotate_store(
            qkv.as_ptr(),
            k.as_ptr(),
            v.as_ptr(),
            &raw_rotation,
            positions.as_ptr(),
            slots.as_ptr(),
        )
    })
}

/// Attention of `q` `[rows, heads, dim]` over the pool, as the plan says who sees what.
pub fn attend(
    q: &Tensor,
    pool: (&Tensor, &Tensor),
    plan: &AttentionPlan,
    window: Option<usize>,
) -> Result<Tensor, EngineError> {
    let (k, v) = pool;
    let fits = q.dim() == 3
        && k.dim() == 3
        && k.size() == v.size()
        && q.size()[0] as usize == plan.rows()
        && plan.fits(k.size()[1] as usize, usize::MAX);
    require("attend", fits)?;
    let raw_plan = RawPlan {
        tiles: plan.tiles().as_ptr(),
        tile_count: plan.tiles().len() as i64,
        rests: plan.rests().as_ptr(),
        slots: plan.slots().as_ptr(),
    };
    let scale = 1.0 / (last_size(q) as f32).sqrt();
    // SAFETY: the plan's ranges lie inside its slots, its slots inside the pool, its rows inside q.
    take("attend", unsafe {
        dh_attend(q.as_ptr(), k.as_ptr(), v.as_ptr(), &raw_plan, window.unwrap_or(0) as i64, scale)
    })
}

/// A float tensor's values on the host.
pub fn to_host(tensor: &Tensor) -> Result<Vec<f32>, EngineError> {
    let mut values = vec![0.0; tensor.numel()];
    // SAFETY: the shim refuses a count that is not the tensor's.
    let failed = unsafe { dh_to_host(tensor.as_ptr(), values.as_mut_ptr(), values.len() as i64) };
    if failed == 0 { Ok(values) } else { Err(error("copying to the host")) }
}

/// Copies slots of a pool `[heads, slots, dim]`, in order, as `[from, to]`.
pub fn move_slots(pool: &Tensor, moves: &[[u32; 2]]) -> Result<(), EngineError> {
    let slots = pool.size()[1];
    require("move_slots", moves.iter().flatten().all(|&slot| i64::from(slot) < slots))?;
    // SAFETY: all slots lie inside the pool.
    let failed = unsafe { dh_move_slots(pool.as_ptr(), moves.as_ptr().cast(), moves.len() as i64) };
    if failed == 0 { Ok(()) } else { Err(error("moving keys and values")) }
}

/// Maps a weight file.
pub fn map_file(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: weights are read once while loading; a file that is cut short meanwhile kills the process, as it
    // does with every loader that maps.
    unsafe { Mmap::map(file) }
}

fn raw(tensor: Option<&Tensor>) -> Raw {
    tensor.map_or(std::ptr::null(), |tensor| tensor.as_ptr())
}

fn last_size(tensor: &Tensor) -> usize {
    tensor.size().last().map_or(0, |&size| size as usize)
}

fn require(stage: &'static str, fits: bool) -> Result<(), EngineError> {
    if fits { Ok(()) } else { Err(EngineError::Step { stage, reason: "shapes do not fit".into() }) }
}

fn take(stage: &'static str, tensor: *mut C_tensor) -> Result<Tensor, EngineError> {
    if tensor.is_null() {
        return Err(error(stage));
    }
    // SAFETY: the shim returned a new tensor and gave up ownership.
    Ok(unsafe { Tensor::from_ptr(tensor) })
}

fn error(stage: &'static str) -> EngineError {
    EngineError::Step { stage, reason: error_text() }
}

fn error_text() -> String {
    // SAFETY: a thread-local string that lives until this thread's next failure.
    let text = unsafe { CStr::from_ptr(dh_error()) };
    text.to_string_lossy().lines().next().unwrap_or_default().to_owned()
}
