// The ranks of a model group split some operators by channels. A rank then has a range of channels of all pictures of the group: `batch`
// pictures per rank, in the order of ranks.

// Copies `groups` groups of eight channels of each row from `from` [rows, from_groups], where the copy begins with group `first`, to
// `to` [rows, to_groups], where it begins with group `at`.
extern "C" __global__ void __launch_bounds__(256)
    copy_channels(const T* from, T* to, u64 rows, u32 groups, u32 from_groups, u32 to_groups, u64 first, u64 at) {
    pdl_wait();
    FOR_ITEMS(i, rows * groups) {
        u64 row = i / groups, group = i % groups;
        store(to, at + row * to_groups + group, load(from, first + row * from_groups + group));
    }
}

// Zeros the pictures that are padding. `controls` are the control blocks of all ranks of the model group, `words` u32 apart. A thread
// block zeros one picture, which has `groups` groups of eight values.
extern "C" __global__ void __launch_bounds__(256)
    clear_padded_pictures(T* y, const u32* controls, u32 words, u32 batch, u32 groups) {
    pdl_wait();
    if (blockIdx.x % batch < control_of(controls, words, blockIdx.x / batch)->valid) return;
    for (u32 i = threadIdx.x; i < groups; i += blockDim.x) store(y, (u64)blockIdx.x * groups + i, zeros());
}

// Copies a control block for use with all `pictures` pictures of the model group, none of which counts as padding. One thread.
extern "C" __global__ void group_control(const Control* from, Control* to, u32 pictures) {
    pdl_wait();
    *to = *from;
    to->valid = pictures;
}
