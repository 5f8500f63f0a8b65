//! The `lockstep` program: one binary for the server, its agents, their ranks and the command line.

mod cli;

use clap::{CommandFactory as _, Parser, Subcommand};
use lockstep_host::exit_without_handlers;

/// Self-hosted training: submit a job, watch its ranks train in lockstep, never lose a run.
#[derive(Parser)]
#[command(name = "lockstep", version, max_term_width = 100, disable_help_subcommand = true, after_help = cli::EXIT_STATUS_HELP)]
struct Program {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(Box<cli::serve::Args>),
    /// Manage the certificate authority (CA) of a server: create and show it, issue and revoke certificates
    #[command(subcommand)]
    Ca(cli::ca::Action),
    Demo(cli::demo::Args),
    Agent(cli::agent::Args),
    Train(cli::train::Args),
    Launch(cli::launch::Args),
    #[command(hide = true)]
    Launched(cli::launch::node::Args),
    #[command(hide = true)]
    Rank(cli::rank::Args),
    Init(cli::init::Args),
    Submit(cli::submit::Args),
    Validate(cli::validate::Args),
    Plan(cli::plan::Args),
    List(cli::list::Args),
    Queue(cli::queue::Args),
    /// Show one job
    Show(cli::api::JobArgs),
    /// Show a job's progress until it ends
    ///
    /// With --json, the command prints each event of the job as a line of JSON, and the job as the last line, with
    /// `"type": "job"`.
    Watch(cli::api::JobArgs),
    Logs(cli::logs::Args),
    Metrics(cli::metrics::Args),
    Compare(cli::compare::Args),
    /// Pause a job: its ranks write a checkpoint and free their slots
    Pause(cli::job_actions::Args),
    /// Resume a paused job; its final weights are the same as without a pause
    Resume(cli::job_actions::Args),
    /// Cancel a job: its ranks end, but its checkpoints stay
    Cancel(cli::job_actions::Args),
    /// Retry a failed or cancelled job from its newest checkpoint
    Retry(cli::job_actions::Args),
    Fork(cli::fork::Args),
    Edit(cli::edit::Args),
    /// List a job's checkpoints, newest first
    Checkpoints(cli::api::JobArgs),
    Download(cli::download::Args),
    Export(cli::export::Args),
    /// Import runs of other programs: from TensorBoard, MLflow, W&B, CSV or Parquet
    ///
    /// Stores each run, with its settings and every point, as a run from elsewhere (a run that another program trained). A second import of
    /// the same run adds only new points.
    #[command(subcommand)]
    Import(cli::import::Format),
    Delete(cli::delete::Args),
    Predict(cli::predict::Args),
    Evaluate(cli::evaluate::Args),
    /// Handle a request about a model or a dataset (started by agents)
    #[command(hide = true)]
    Inspect,
    /// Download, prepare, register, list, inspect and remove datasets
    #[command(subcommand)]
    Dataset(cli::dataset::Action),
    /// Show, pause, cancel and delete sweeps, which `lockstep submit` starts
    #[command(subcommand)]
    Sweep(cli::sweeps::Action),
    /// Register checkpoints as versions of models, and give aliases to versions
    #[command(subcommand)]
    Model(cli::model::Action),
    /// Download trained weights for fine-tuning
    #[command(subcommand)]
    Weights(cli::weights::Action),
    /// List, drain and remove the machines whose agents have joined the server
    #[command(subcommand)]
    Machine(cli::machine::Action),
    /// Create, list and revoke access tokens
    #[command(subcommand)]
    Token(cli::token::Action),
    /// Add, list, change and remove people who sign in with a name and a password
    #[command(subcommand)]
    User(cli::user::Action),
    /// Add, list, test and remove webhooks, which send events of jobs to chats, people and programs
    #[command(subcommand)]
    Webhook(cli::webhook::Action),
    /// Print a sign-in link for a browser, which works once and expires after ten minutes
    LoginLink(cli::api::ServerArgs),
    /// Apply migrations to a database (the server does this when it starts)
    Migrate(cli::database::DatabaseArgs),
    Backup(cli::database::BackupArgs),
    Restore(cli::database::RestoreArgs),
    Doctor(cli::doctor::Args),
    Bench(cli::bench::Args),
    Completions(cli::completions::Args),
    Man(cli::man::Args),
    #[command(hide = true)]
    Reference(cli::reference::Args),
    #[command(hide = true)]
    Kernels(cli::kernels::Args),
    Help(cli::help::Args),
}

fn main() {
    let command = match Program::try_parse() {
        Ok(program) => program.command,
        Err(error) => {
            let arguments: Vec<_> = std::env::args_os().collect();
            cli::mistyped::explain(error, Program::command(), &arguments).exit()
        }
    };
    let result = match command {
        Command::Serve(args) => cli::serve::run(*args),
        Command::Ca(action) => cli::ca::run(action),
        Command::Demo(args) => cli::demo::run(args),
        Command::Agent(args) => cli::agent::run(args),
        Command::Train(args) => cli::train::run(args),
        Command::Launch(args) => cli::launch::run(args),
        Command::Launched(args) => cli::launch::node::run(&args),
        Command::Rank(args) => cli::rank::run(args),
        Command::Init(args) => cli::init::run(&args),
        Command::Submit(args) => cli::submit::run(args),
        Command::Validate(args) => cli::validate::run(&args),
        Command::Plan(args) => cli::plan::run(args),
        Command::List(args) => cli::list::run(args),
        Command::Queue(args) => cli::queue::run(args),
        Command::Show(args) => cli::show::run(args),
        Command::Watch(args) => cli::watch::run(args),
        Command::Logs(args) => cli::logs::run(args),
        Command::Metrics(args) => cli::metrics::run(args),
        Command::Compare(args) => cli::compare::run(args),
        Command::Pause(args) => cli::job_actions::run(&args, "pause"),
        Command::Resume(args) => cli::job_actions::run(&args, "resume"),
        Command::Cancel(args) => cli::job_actions::run(&args, "cancel"),
        Command::Retry(args) => cli::job_actions::run(&args, "retry"),
        Command::Fork(args) => cli::fork::run(args),
        Command::Edit(args) => cli::edit::run(args),
        Command::Checkpoints(args) => cli::checkpoints::run(args),
        Command::Download(args) => cli::download::run(args),
        Command::Export(args) => cli::export::run(&args),
        Command::Import(format) => cli::import::run(&format),
        Command::Delete(args) => cli::delete::run(args),
        Command::Evaluate(args) => cli::evaluate::run(args),
        Command::Predict(args) => cli::predict::run(args),
        Command::Inspect => lockstep_worker::inspect::run().map_err(Into::into),
        Command::Dataset(action) => cli::dataset::run(action),
        Command::Sweep(action) => cli::sweeps::run(action),
        Command::Model(action) => cli::model::run(action),
        Command::Weights(action) => cli::weights::run(&action),
        Command::Machine(action) => cli::machine::run(action),
        Command::Token(action) => cli::token::run(action),
        Command::User(action) => cli::user::run(action),
        Command::Webhook(action) => cli::webhook::run(action),
        Command::LoginLink(args) => cli::token::print_login_link(args),
        Command::Migrate(args) => cli::database::migrate(args),
        Command::Backup(args) => cli::database::back_up(args),
        Command::Restore(args) => cli::database::run_restore(args),
        Command::Doctor(args) => cli::doctor::run(args),
        Command::Bench(args) => cli::bench::run(args),
        Command::Completions(args) => cli::completions::run(&args, Program::command()),
        Command::Man(args) => cli::man::run(&args, Program::command()),
        Command::Reference(args) => cli::reference::run(&args, Program::command()),
        Command::Kernels(args) => cli::kernels::run(&args),
        Command::Help(args) => cli::help::run(&args, Program::command()),
    };
    // CUDA's exit handlers would wait for the GPU, which may wait for ranks that have exited.
    exit_without_handlers(cli::exit_status(result))
}
