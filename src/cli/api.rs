//! A command of its own.
