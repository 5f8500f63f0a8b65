use super::*;
use std::os::unix::fs::symlink;

fn touch(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, "not a library").unwrap();
}

/// A Python environment that is reached by a link on the path, as on machines prepared for PyTorch.
fn environment(root: &Path) -> impl Fn(&str) -> Option<OsString> {
    let site = root.join("opt/venv/lib/python3.12/site-packages/nvidia");
    touch(&site.join("cudnn/lib/libcudnn.so.9"));
    touch(&site.join("nccl/lib/libnccl.so.2"));
    touch(&site.join("cu13/lib/libnvrtc.so.13"));
    touch(&root.join("opt/venv/bin/python3"));
    fs::create_dir_all(root.join("bin")).unwrap();
    symlink("../opt/venv/bin/python3", root.join("bin/python3")).unwrap();
    let bin = root.join("bin").into_os_string();
    move |name| (name == "PATH").then(|| bin.clone())
}

#[test]
fn libraries_of_a_python_environment_are_found_through_the_link_on_the_path() {
    let root = tempfile::tempdir().unwrap();
    let libraries = Libraries::find_in(&folders(&environment(root.path())), false);
    let nccl = libraries.get(Library::Nccl).unwrap();
    assert!(nccl.path.ends_with("nvidia/nccl/lib/libnccl.so.2"), "{nccl:?}");
    assert!(libraries.get(Library::Cudnn).is_some() && libraries.get(Library::Nvrtc).is_some());

    let cache = root.path().join("cache/libraries");
    let variables = libraries.environment(&cache).unwrap();
    let (name, value) = &variables[0];
    assert_eq!(name, LIBRARY_PATH_VARIABLE);
    let path: Vec<_> = std::env::split_paths(value).collect();
    assert_eq!(path[0].parent(), Some(&*cache));
    let dir = &path[0];
    assert!(path.iter().any(|p| p.ends_with("nvidia/cudnn/lib")), "{path:?}");
    assert_eq!(fs::read_link(dir.join("libnccl.so")).unwrap(), nccl.path);
    // If the system also has a cuDNN, cudarc must not load it.
    assert_eq!(fs::read_link(dir.join("libcudnn.so")).unwrap(), libraries.get(Library::Cudnn).unwrap().path);
    // The second call works too, also if the path of NCCL has changed.
    symlink("/elsewhere", dir.join("other")).unwrap();
    fs::rename(dir.join("other"), dir.join("libnccl.so")).unwrap();
    libraries.environment(&cache).unwrap();
    assert_eq!(fs::read_link(dir.join("libnccl.so")).unwrap(), nccl.path);
}

#[test]
fn torchvision_s_copy_of_nvjpeg_is_found_if_there_is_no_other() {
    let root = tempfile::tempdir().unwrap();
    let variables = environment(root.path());
    let packages = root.path().join("opt/venv/lib/python3.12/site-packages");
    let found = || {
        // The libraries of the test machine are ignored.
        let mut folders = folders(&variables);
        folders.usual.retain(|dir| dir.starts_with(root.path()));
        folders.torchvision.retain(|dir| dir.starts_with(root.path()));
        let libraries = Libraries::find_in(&folders, false);
        (libraries.get(Library::Nvjpeg).map(|nvjpeg| nvjpeg.path.clone()), libraries)
    };
    assert_eq!(found().0, None);
    let copy = packages.join("torchvision.libs/libnvjpeg.4a0b5c81.so.13");
    touch(&copy);
    touch(&packages.join("torchvision.libs/libjpeg.ceea7512.so.62"));
    let (path, libraries) = found();
    assert_eq!(path.and_then(|p| p.canonicalize().ok()), copy.canonicalize().ok());
    // nvJPEG is opened by its path, so its folder, which has other libraries, must not be on the linker's path.
    assert!(libraries.folders().iter().all(|dir| !dir.ends_with("torchvision.libs")));
    let own = packages.join("nvidia/cu13/lib/libnvjpeg.so.13");
    touch(&own);
    assert_eq!(found().0.and_then(|p| p.canonicalize().ok()), own.canonicalize().ok());
}

#[test]
fn folders_of_the_variable_are_searched_first() {
    let root = tempfile::tempdir().unwrap();
    let plain = environment(root.path());
    let own = root.path().join("own");
    touch(&own.join("libcudnn.so.9"));
    let with = |name: &str| {
        if name == FOLDERS_VARIABLE { Some(own.clone().into_os_string()) } else { plain(name) }
    };
    let libraries = Libraries::find_in(&folders(&with), false);
    assert_eq!(libraries.get(Library::Cudnn).unwrap().path, own.join("libcudnn.so.9"));
    assert!(libraries.get(Library::Nccl).is_some());
}

#[test]
fn errors_for_missing_libraries_say_how_to_install_them() {
    let nothing = Libraries::default();
    let error = check_found(&nothing, Library::needed(2)).unwrap_err();
    for part in ["cuDNN (libcudnn.so.9)", "nvidia-cudnn-cu13", "NCCL", "driver", FOLDERS_VARIABLE] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(!check_found(&nothing, Library::needed(1)).unwrap_err().contains("NCCL"));
}

#[test]
fn a_file_that_is_no_library_is_an_error_and_no_panic() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("libcudnn.so.9");
    touch(&path);
    for which in Library::ALL {
        let error =
            FoundLibrary { which, path: path.clone(), is_on_linker_path: false }.version().unwrap_err();
        assert!(error.contains("libcudnn.so.9"), "{error}");
    }
}
