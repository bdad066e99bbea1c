#include <pybind11/pybind11.h>

#include <string>

#include "cpu/capability.h"
#include "lookup.h"
#include "optimizers/registry.h"

namespace py = pybind11;

namespace torchrec_ext {
namespace {

// A real enum.Enum whose values are strings, which pybind11's own enum types cannot have.
py::object make_optim_type(const py::module_& module) {
  py::list members;
  for_each_optimizer([&](OptimType, const char* member, const char* value, auto) {
    members.append(py::make_tuple(member, value));
  });
  return py::module_::import("enum").attr("Enum")("OptimType", members,
                                                  py::arg("module") = module.attr("__name__"),
                                                  py::arg("qualname") = "OptimType");
}

// {member name: {"hyperparameters": (name, ...), "states": ((name, rowwise), ...)}}, in the order
// of the ops' numbering.
py::dict registered_optimizers() {
  py::dict result;
  for_each_optimizer([&](OptimType, const char* member, const char*, auto tag) {
    using Optimizer = typename decltype(tag)::Type;
    py::list hyperparameters;
    for (const char* name : Optimizer::kHyperparameters) {
      hyperparameters.append(name);
    }
    py::list states;
    for (const StateInfo& state : Optimizer::kStates) {
      states.append(py::make_tuple(state.name, state.rowwise));
    }
    py::dict entry;
    entry["hyperparameters"] = py::tuple(hyperparameters);
    entry["states"] = py::tuple(states);
    result[member] = entry;
  });
  return result;
}

py::dict build_information() {
  py::dict result;
  result["compiler"] = __VERSION__;
  result["cpu_capability"] = cpu::capability_name(cpu::capability());
  return result;
}

}  // namespace
}  // namespace torchrec_ext

PYBIND11_MODULE(_C, m) {
  using namespace torchrec_ext;
  m.attr("OptimType") = make_optim_type(m);
  // Of device_layout's result: the numbers of a table and of a feature.
  m.attr("device_layout_sizes") =
      py::make_tuple(sizeof(Table) / sizeof(int64_t), sizeof(Feature) / sizeof(int64_t));
  m.def("registered_optimizers", &registered_optimizers);
  m.def("build_information", &build_information);
  m.def("set_cpu_capability", [](const std::string& name) {
    cpu::set_capability(cpu::capability_from_name(name.c_str()));
  });
}
