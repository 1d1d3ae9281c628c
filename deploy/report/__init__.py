"""What a refresh did: report.json for programs, report.html for people."""
