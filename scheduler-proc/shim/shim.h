// How the ATen half of the shim reports failure: no C++ exception crosses into Rust.
#pragma once
#include <ATen/ATen.h>

#include <exception>
#include <string>

namespace dh {

void set_error(const char* what);

// Runs `body`; 0 when it returned, 1 when it threw (dh_error then says why).
template <class Body>
int guarded(Body body) {
  try {
    body();
    return 0;
  } catch (const c10::Error& e) {
    set_error(e.what_without_backtrace());
  } catch (const std::exception& e) {
    set_error(e.what());
  }
  return 1;
}

}  // namespace dh
