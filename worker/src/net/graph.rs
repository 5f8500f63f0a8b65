//! The network as data.

/// A network: operations in forward order.
#[derive(Debug, Clone)]
pub struct Network {
    pub image_size: usize,
    pub channels: usize,
    pub classes: usize,
}
