//! `completions` and `man`: what shells and `man` know of the command line, made from its own definition.

use super::terminal;
use clap::{Args, Command};
use clap_complete::Shell;
use std::io;

/// Which shell.
#[derive(Debug, Args)]
pub(super) struct Completions {
    /// The shell that will read them.
    shell: Shell,
}

impl Completions {
    /// Prints the completions of this command line.
    pub fn run(&self, mut command: Command) -> anyhow::Result<()> {
        let mut text = Vec::new();
        let name = command.get_name().to_owned();
        clap_complete::generate(self.shell, &mut command, name, &mut text);
        print(text)
    }
}

/// Prints the manual page: the program's, then that of each command.
pub(super) fn man(mut command: Command) -> anyhow::Result<()> {
    command.build();
    let mut text = Vec::new();
    page(&command, &mut text)?;
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        page(sub, &mut text)?;
    }
    print(text)
}

fn page(command: &Command, text: &mut Vec<u8>) -> io::Result<()> {
    clap_mangen::Man::new(command.clone()).render(text)
}

fn print(text: Vec<u8>) -> anyhow::Result<()> {
    Ok(terminal::print(String::from_utf8(text)?)?)
}
