// Owns what tch lacks: inference mode, flushing of denormals, prepacked oneDNN linears.
#include "shim.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>

namespace {

thread_local std::string last_error;

at::Tensor call(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  op.callBoxed(&stack);
  return stack[0].toTensor();
}

}  // namespace

void dh::set_error(const char* what) { last_error = what; }

extern "C" {

const char* dh_error() { return last_error.c_str(); }

void* dh_inference_mode_new() { return new c10::InferenceMode(true); }

void dh_inference_mode_free(void* guard) { delete static_cast<c10::InferenceMode*>(guard); }

int dh_set_flush_denormal(int on) { return at::globalContext().setFlushDenormal(on != 0) ? 1 : 0; }

int dh_load_cuda(const char* library) {
  if (dlopen(library, RTLD_NOW | RTLD_GLOBAL)) return 0;
  dh::set_error(dlerror());
  return 1;
}

// Free bytes of the current CUDA device, or -1.
int64_t dh_free_device_memory() {
  int64_t bytes = -1;
  dh::guarded([&] {
    auto* allocator = c10::getDeviceAllocator(c10::kCUDA);
    bytes = static_cast<int64_t>(allocator->getMemoryInfo(0).first);
  });
  return bytes;
}

// Null on failure.
at::Tensor* dh_linear_pack(const at::Tensor* weight) {
  at::Tensor* packed = nullptr;
  dh::guarded([&] {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_reorder_linear_weight", "");
    torch::jit::Stack stack{*weight, c10::IValue()};
    packed = new at::Tensor(call(op, stack));
  });
  return packed;
}

// x: [rows, in]; `bias` may be null. Null on failure.
at::Tensor* dh_linear(const at::Tensor* x, const at::Tensor* packed, const at::Tensor* bias) {
  at::Tensor* result = nullptr;
  dh::guarded([&] {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "");
    c10::List<std::optional<at::Scalar>> scalars;
    torch::jit::Stack stack{*x, *packed, bias ? c10::IValue(*bias) : c10::IValue(), std::string("none"),
                            scalars, c10::IValue()};
    result = new at::Tensor(call(op, stack));
  });
  return result;
}

}  // extern "C"
