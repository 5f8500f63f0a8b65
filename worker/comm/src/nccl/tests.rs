use super::*;
use crate::{
    gather,
    rendezvous::{
        Store,
        loopback::{rendezvous_config, unused_port},
    },
};

#[test]
#[ignore = "needs a GPU"]
fn gpu_a_group_of_one_gathers_and_is_aborted() {
    let store = Store::join(rendezvous_config(unused_port(), 0, 1)).unwrap();
    let found = gather::run(&store, 0).unwrap();
    assert_eq!(found.values, [0.0]);
    let timeout = Duration::from_secs(60);
    let nccl = Nccl::connect(Exchange::Store(&store, timeout), "another", 0, timeout).unwrap();
    nccl.async_error().unwrap();
    let began = Instant::now();
    nccl.abort("enough");
    assert!(matches!(nccl.async_error(), Err(CommError::Aborted { reason, .. }) if reason == "enough"));
    drop(nccl);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_an_abort_is_safe_while_other_threads_ask_for_errors() {
    for round in 0..5 {
        let store = Store::join(rendezvous_config(unused_port(), 0, 1)).unwrap();
        let timeout = Duration::from_secs(60);
        let nccl = Nccl::connect(Exchange::Store(&store, timeout), "asked", 0, timeout).unwrap();
        std::thread::scope(|scope| {
            let asking: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        loop {
                            if let Err(error) = nccl.async_error() {
                                return error;
                            }
                        }
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(10 * round));
            nccl.abort("enough");
            for thread in asking {
                let error = thread.join().unwrap();
                assert!(matches!(&error, CommError::Aborted { reason, .. } if reason == "enough"), "{error}");
            }
        });
    }
}

#[test]
fn a_missing_nccl_is_an_error() {
    if libraries::check_loadable(&[Library::Driver, Library::Nccl]).is_ok() {
        return;
    }
    let store = Store::join(rendezvous_config(unused_port(), 0, 1)).unwrap();
    let timeout = Duration::from_secs(5);
    let error = Nccl::connect(Exchange::Store(&store, timeout), "none", 0, timeout).unwrap_err().to_string();
    assert!(error.contains("not found") || error.contains("cannot be loaded"), "{error}");
}
