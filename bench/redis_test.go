package main

import "testing"

func TestCommandsThatScriptsRunAreCountedApart(t *testing.T) {
	got, err := parseCommands("# Commandstats\r\n" +
		"cmdstat_evalsha:calls=10,usec=1,usec_per_call=0.1\r\n" +
		"cmdstat_get:calls=30,usec=1\r\ncmdstat_set:calls=20,usec=1\r\n" +
		"cmdstat_client|setinfo:calls=2,usec=1\r\ncmdstat_info:calls=99,usec=1\r\n")
	if want := (commands{sent: 12, inScripts: 50}); got != want || err != nil {
		t.Errorf("parseCommands = %+v, %v; want %+v", got, err, want)
	}
	if _, err := parseCommands("cmdstat_get:calls=many"); err == nil {
		t.Error("calls=many is no error")
	}
}
