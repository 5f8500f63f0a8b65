//! The shape of an activation.

/// Height, width and channels of one picture's activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorShape {
    pub height: usize,
    pub width: usize,
    pub channels: usize,
}

impl TensorShape {
    /// Number of values of one picture.
    pub fn len(self) -> usize {
        self.height * self.width * self.channels
    }

    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Number of pixels of one picture.
    pub fn pixels(self) -> usize {
        self.height * self.width
    }
}
