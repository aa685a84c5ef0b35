import com.sun.management.OperatingSystemMXBean;
import io.debezium.embedded.Connect;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import java.io.FileReader;
import java.lang.management.ManagementFactory;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import java.util.concurrent.CountDownLatch;
import java.util.stream.Collectors;
import org.apache.kafka.connect.data.Struct;
import org.apache.kafka.connect.source.SourceRecord;

/**
 * Reads a slot with Debezium's asynchronous embedded engine until a number of rows has come, and prints one
 * JSON object: rows by table and operation, wall and CPU seconds of this process at half of them and at the end.
 * The records are taken as they are (Connect format): nothing is serialized, nothing is written.
 */
public class Peer {
    static final Map<String, Long> ROWS = new TreeMap<>();
    static final OperatingSystemMXBean SYSTEM =
        (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
    static long began;
    static long seen;
    static String half;

    static String now(String prefix) {
        double wall = (System.nanoTime() - began) / 1e9;
        double cpu = SYSTEM.getProcessCpuTime() / 1e9;
        return String.format("\"%swall\": %.4f, \"%scpu\": %.4f", prefix, wall, prefix, cpu);
    }

    static void count(SourceRecord record) {
        if (!(record.value() instanceof Struct change) || change.schema().field("source") == null) {
            return;
        }
        Struct source = change.getStruct("source");
        String operation = switch (change.getString("op")) {
            case "c" -> "I";
            case "u" -> "U";
            default -> "D";
        };
        String table = source.getString("schema") + "." + source.getString("table");
        ROWS.merge(table + " " + operation, 1L, Long::sum);
        seen++;
    }

    public static void main(String[] given) throws Exception {
        Properties properties = new Properties();
        try (FileReader file = new FileReader(given[0])) {
            properties.load(file);
        }
        long wanted = Long.parseLong(given[1]);
        CountDownLatch done = new CountDownLatch(1);
        String[] failed = new String[1];
        DebeziumEngine<RecordChangeEvent<SourceRecord>> engine = DebeziumEngine
            .create(ChangeEventFormat.of(Connect.class))
            .using(properties)
            .using((success, message, error) -> {
                if (!success) {
                    failed[0] = message;
                    done.countDown();
                }
            })
            .notifying((List<RecordChangeEvent<SourceRecord>> records,
                        DebeziumEngine.RecordCommitter<RecordChangeEvent<SourceRecord>> committer) -> {
                if (began == 0) {
                    began = System.nanoTime();
                }
                for (RecordChangeEvent<SourceRecord> record : records) {
                    count(record.record());
                    committer.markProcessed(record);
                }
                committer.markBatchFinished();
                if (half == null && seen * 2 >= wanted) {
                    half = now("half_") + ", \"half_rows\": " + seen;
                }
                if (seen >= wanted) {
                    done.countDown();
                }
            })
            .build();
        Thread runner = new Thread(engine, "engine");
        runner.start();
        done.await();
        String end = now("");
        if (failed[0] != null) {
            System.err.println(failed[0]);
            System.exit(1);
        }
        String rows = ROWS.entrySet().stream()
            .map(each -> "\"" + each.getKey() + "\": " + each.getValue())
            .collect(Collectors.joining(", ", "{", "}"));
        System.out.println("{\"rows\": " + rows + ", " + half + ", " + end + "}");
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }
}
