//! ASHA over 27 settings finds the best setting of a grid with fewer steps.

use crate::{
    pictures,
    server::{Agents, Server, number, training_permit},
    sweeps::{submit_sweep, wait_for_sweep},
};

#[tokio::test]
async fn asha_finds_the_best_setting_of_a_grid_with_less_than_half_of_the_steps() {
    let _permit = training_permit().await;
    // By default, tests slow steps after step 100. Here only steps that no trial reaches are slow.
    let environment = vec![("LOCKSTEP_FAULT".to_owned(), "step:slow@1000000".to_owned())];
    let server = Server::start_in(Agents::Local { cpu_slots: 2 }, environment).await;
    server.register("fashion", &pictures::idx_dataset(server.folder().path(), 640, 320)).await;
    let file = |method: &str, rungs: &str| {
        format!(
            "name = \"{method}\"\n[model]\narch = \"resnet20\"\n[data]\ndataset = \"fashion\"\nimage_size = 16\n\
             [train]\nepochs = 9\nbatch_size = 16\n[parallel]\nranks = 1\ndevice = \"cpu\"\n\
             [sweep]\nmethod = \"{method}\"\n{rungs}metric = {{ name = \"val_loss\" }}\n[sweep.parameters]\n\
             train.lr = {{ values = [0.000001, 0.00001, 0.05] }}\ntrain.momentum = {{ values = [0.0, 0.5, 0.99] }}\n\
             train.weight_decay = {{ values = [0.0, 0.8, 1.0] }}\n"
        )
    };
    let grid = wait_for_sweep(&server, &submit_sweep(&server, &file("grid", ""))).await;
    let asha =
        wait_for_sweep(&server, &submit_sweep(&server, &file("asha", "reduction = 2\nrungs = 4\n"))).await;
    assert_eq!(asha["best"]["setting"], grid["best"]["setting"], "{grid:#} {asha:#}");
    assert_eq!(
        asha["best"]["metric"], grid["best"]["metric"],
        "a trial that paused ends with the same metric"
    );
    let (steps, grid_steps) = (number(&asha["steps"]), number(&grid["steps"]));
    assert_eq!(grid_steps, 27 * 9 * 40, "27 settings, 9 epochs, 40 steps an epoch");
    assert!(steps * 10 <= grid_steps * 4, "{steps} of {grid_steps} steps");
    server.stop().await;
}
