//! `CASES.md` names tests that there are.

use std::collections::HashMap;
use std::path::Path;

#[test]
fn every_test_that_the_table_of_cases_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = std::fs::read_to_string(root.join("tests/CASES.md")).expect("tests/CASES.md");
    let mut files: HashMap<String, String> = HashMap::new();
    let mut named = 0;
    let rows = table.lines().filter(|line| line.starts_with("| B"));
    for row in rows {
        // What is between two backticks is every second part.
        for name in row.split('`').skip(1).step_by(2) {
            let Some((file, test)) = name.split_once("::") else {
                continue;
            };
            // A type of this crate, not a test.
            if file.starts_with(char::is_uppercase) {
                continue;
            }
            let path = match file.strip_prefix("server/") {
                Some(_) => format!("src/{file}.rs"),
                None => format!("tests/{file}.rs"),
            };
            let source = files.entry(path.clone()).or_insert_with(|| {
                std::fs::read_to_string(root.join(&path))
                    .unwrap_or_else(|error| panic!("{path}: {error}, for this row:\n{row}"))
            });
            assert!(
                source.contains(&format!("fn {test}(")),
                "{path} has no test `{test}`; the table says:\n{row}"
            );
            named += 1;
        }
    }
    assert!(named > 100, "{named} tests were found in the table");
}
