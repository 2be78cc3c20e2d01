// The operations as functions of the Python module. They do what torch's dispatcher would call,
// without the dispatcher, whose schema, boxes and keys take 6 µs of a call.
// flash_attn/dispatch/direct.py decides which calls come here. Tensors are converted to handles and
// back by the functions that torch has for programs of AOTInductor.
#pragma once

#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <utility>
#include <vector>

#include "api/tensors.h"

namespace flash::api {

// Whether x is a torch.Tensor or torch.nn.Parameter, and not of a class derived from them.
bool is_plain_tensor(PyObject* x);

// The tensors among a call's arguments, in their order.
class TensorArguments {
 public:
  // If the conversion fails, a Python error is set and there are no tensors.
  TensorArguments(PyObject* const* args, Py_ssize_t count);

  // Whether a kernel can use them: the first is on a GPU, and all have memory. Tensors of torch's
  // transforms have none, and torch's efficient zero tensors none until they are read. The
  // operation itself refuses tensors on different devices.
  bool for_kernels() const;

  Tensor next() { return std::move(tensors_[next_++]); }

 private:
  std::vector<Tensor> tensors_;
  size_t next_ = 0;
};

// Reads an argument of a type. `takes` is false for objects that only torch converts, such as
// numpy's numbers and symbols.
template <class T>
struct Argument;

template <>
struct Argument<Tensor> {
  static bool takes(PyObject* x) { return is_plain_tensor(x); }
  static Tensor read(PyObject*, TensorArguments& tensors) { return tensors.next(); }
};

template <>
struct Argument<OptionalTensor> {
  static bool takes(PyObject* x) { return x == Py_None || is_plain_tensor(x); }
  static OptionalTensor read(PyObject* x, TensorArguments& tensors) {
    return x == Py_None ? OptionalTensor() : tensors.next();
  }
};

template <>
struct Argument<bool> {
  static bool takes(PyObject* x) { return PyBool_Check(x); }
  static bool read(PyObject* x, TensorArguments&) { return x == Py_True; }
};

template <>
struct Argument<int64_t> {
  static bool takes(PyObject* x) { return PyLong_CheckExact(x); }
  static int64_t read(PyObject* x, TensorArguments&) { return PyLong_AsLongLong(x); }
};

template <>
struct Argument<double> {
  static bool takes(PyObject* x) { return PyFloat_Check(x) || PyLong_CheckExact(x); }
  static double read(PyObject* x, TensorArguments&) { return PyFloat_AsDouble(x); }
};

// Releases the interpreter, so that other threads run while this one waits for the GPU.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() { PyEval_RestoreThread(state_); }
  WithoutInterpreter(WithoutInterpreter const&) = delete;

 private:
  PyThreadState* state_;
};

// A Python list of the tensors, with None for null pointers; null with a Python error set.
PyObject* to_python(std::initializer_list<Tensor const*> tensors);

inline Tensor const* if_any(Tensor const& tensor) { return &tensor; }
inline Tensor const* if_any(OptionalTensor const& tensor) { return tensor ? &*tensor : nullptr; }

// Sets the Python error that torch would make of the C++ exception that is being handled.
PyObject* raise_current_exception();

template <auto kFunction, class = decltype(kFunction)>
struct Direct;

template <auto kFunction, class Result, class... Parameters>
struct Direct<kFunction, Result (*)(Parameters...)> {
  // Takes all arguments by position. Returns NotImplemented for arguments that only the dispatcher
  // may serve.
  static PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return call(args, count, std::index_sequence_for<Parameters...>{});
  }

 private:
  template <size_t... I>
  static PyObject* call(PyObject* const* args, Py_ssize_t count, std::index_sequence<I...>) {
    if (count != sizeof...(Parameters) || !(Argument<Parameters>::takes(args[I]) && ...)) {
      return Py_NewRef(Py_NotImplemented);
    }
    try {
      TensorArguments tensors(args, count);
      if (PyErr_Occurred()) {
        return nullptr;
      }
      if (!tensors.for_kernels()) {
        return Py_NewRef(Py_NotImplemented);
      }
      // Braces evaluate from left to right, in the order of the tensors.
      std::tuple<Parameters...> values{Argument<Parameters>::read(args[I], tensors)...};
      return PyErr_Occurred() ? nullptr : results(run(values));
    } catch (...) {
      return raise_current_exception();
    }
  }

  static auto run(std::tuple<Parameters...>& values) {
    WithoutInterpreter const without;
    if constexpr (std::is_void_v<Result>) {
      std::apply(kFunction, values);
      return std::tuple<>();
    } else {
      return std::apply(kFunction, values);
    }
  }

  static PyObject* results(std::tuple<> const&) { return Py_NewRef(Py_None); }

  static PyObject* results(Tensor const& tensor) {
    PyObject* const list = to_python({&tensor});
    PyObject* const only = list ? Py_NewRef(PyList_GetItem(list, 0)) : nullptr;
    Py_XDECREF(list);
    return only;
  }

  template <class... T>
  static PyObject* results(std::tuple<T...> const& tensors) {
    return std::apply([](auto const&... t) { return to_python({if_any(t)...}); }, tensors);
  }
};

using DirectCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

void add_direct(char const* name, DirectCall call);

// Puts the functions, and `use_torch`, which has to be called before them, into a module. False
// with a Python error set. Called once.
bool add_direct_functions(PyObject* module);

// Registers an operation on GPU tensors, with the dispatcher and as a direct function.
template <auto kFunction, auto kBoxed = kFunction>
void serve(torch::stable::detail::StableLibrary& library, char const* name) {
  library.impl(name, TORCH_BOX(kBoxed));
  add_direct(name, &Direct<kFunction>::call);
}

}  // namespace flash::api
