//! The worker as its callers see it: data, networks against PyTorch, ranks, the agent, inspections.

mod agent;
mod data;
mod inspect;
mod onnx;
mod pictures;
mod pytorch;
mod ranks;
mod sizes;
mod transforms;
