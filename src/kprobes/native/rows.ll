; Generated from rows.c by `make runtime`.
; 244f09a1e00505aa8d15e5aaf5b06908085989f246cf7238e49ad716937e19be
%struct.row = type { i64, ptr, i64 }
define dso_local i64 @rows_find(ptr %rows, ptr %unit) #0 {
entry:
  %table = alloca ptr, align 8
  %count = alloca i64, align 8
  %number = alloca i32, align 4
  %begins = alloca i8, align 1
  %ends = alloca i8, align 1
  %0 = load ptr, ptr %rows, align 8
  %call = call i32 %0(ptr %unit, ptr nonnull %table, ptr nonnull %count)
  %tobool.not = icmp eq i32 %call, 0
  br i1 %tobool.not, label %for.cond, label %return
for.cond:
  %has.0.off0 = phi i1 [ %retval.i.0, %for.inc ], [ false, %entry ]
  %n.0 = phi i64 [ %inc, %for.inc ], [ 0, %entry ]
  %1 = load i64, ptr %count, align 8
  %cmp = icmp ult i64 %n.0, %1
  %lnot = xor i1 %has.0.off0, true
  %spec.select = select i1 %cmp, i1 %lnot, i1 false
  br i1 %spec.select, label %for.body, label %for.end
for.body:
  %file = getelementptr inbounds nuw i8, ptr %rows, i64 8
  %2 = load ptr, ptr %file, align 8
  %3 = load ptr, ptr %table, align 8
  %call1 = call ptr %2(ptr %3, i64 %n.0, ptr null, ptr null)
  %tobool.i.not = icmp eq ptr %call1, null
  br i1 %tobool.i.not, label %for.inc, label %while.cond.i
while.cond.i:
  %size.i.0 = phi i64 [ %inc.i, %while.body.i ], [ 0, %for.body ]
  %arrayidx.i = getelementptr inbounds i8, ptr %call1, i64 %size.i.0
  %4 = load i8, ptr %arrayidx.i, align 1
  %tobool1.i.not = icmp eq i8 %4, 0
  br i1 %tobool1.i.not, label %while.end.i, label %while.body.i
while.body.i:
  %inc.i = add i64 %size.i.0, 1
  br label %while.cond.i
while.end.i:
  %length.i = getelementptr inbounds nuw i8, ptr %rows, i64 80
  %5 = load i64, ptr %length.i, align 8
  %cmp.i = icmp ult i64 %size.i.0, %5
  br i1 %cmp.i, label %for.inc, label %lor.lhs.false.i
lor.lhs.false.i:
  %length2.i = getelementptr inbounds nuw i8, ptr %rows, i64 80
  %6 = load i64, ptr %length2.i, align 8
  %cmp3.i = icmp ugt i64 %size.i.0, %6
  br i1 %cmp3.i, label %land.lhs.true.i, label %if.end10.i
land.lhs.true.i:
  %length4.i = getelementptr inbounds nuw i8, ptr %rows, i64 80
  %7 = load i64, ptr %length4.i, align 8
  %8 = xor i64 %7, -1
  %9 = getelementptr i8, ptr %call1, i64 %size.i.0
  %arrayidx6.i = getelementptr i8, ptr %9, i64 %8
  %10 = load i8, ptr %arrayidx6.i, align 1
  %cmp7.i.not = icmp eq i8 %10, 47
  br i1 %cmp7.i.not, label %if.end10.i, label %for.inc
if.end10.i:
  br label %for.cond.i
for.cond.i:
  %n.i.0 = phi i64 [ 0, %if.end10.i ], [ %inc24.i, %if.end23.i ]
  %length11.i = getelementptr inbounds nuw i8, ptr %rows, i64 80
  %11 = load i64, ptr %length11.i, align 8
  %cmp12.i = icmp ult i64 %n.i.0, %11
  br i1 %cmp12.i, label %for.body.i, label %for.inc
for.body.i:
  %length14.i = getelementptr inbounds nuw i8, ptr %rows, i64 80
  %12 = load i64, ptr %length14.i, align 8
  %sub15.i = sub i64 %size.i.0, %12
  %13 = getelementptr i8, ptr %call1, i64 %sub15.i
  %arrayidx16.i = getelementptr i8, ptr %13, i64 %n.i.0
  %14 = load i8, ptr %arrayidx16.i, align 1
  %wanted.i = getelementptr inbounds nuw i8, ptr %rows, i64 72
  %15 = load ptr, ptr %wanted.i, align 8
  %arrayidx18.i = getelementptr inbounds i8, ptr %15, i64 %n.i.0
  %16 = load i8, ptr %arrayidx18.i, align 1
  %cmp20.i.not = icmp eq i8 %14, %16
  br i1 %cmp20.i.not, label %if.end23.i, label %for.inc
if.end23.i:
  %inc24.i = add i64 %n.i.0, 1
  br label %for.cond.i
for.inc:
  %retval.i.0 = phi i1 [ false, %for.body ], [ false, %while.end.i ], [ false, %for.body.i ], [ false, %land.lhs.true.i ], [ true, %for.cond.i ]
  %inc = add i64 %n.0, 1
  br label %for.cond
for.end:
  br i1 %has.0.off0, label %lor.lhs.false, label %return
lor.lhs.false:
  %lines = getelementptr inbounds nuw i8, ptr %rows, i64 16
  %17 = load ptr, ptr %lines, align 8
  %call4 = call i32 %17(ptr %unit, ptr nonnull %table, ptr nonnull %count)
  %tobool5.not = icmp eq i32 %call4, 0
  br i1 %tobool5.not, label %for.cond9, label %return
for.cond9:
  %before.0 = phi ptr [ %call21, %for.inc69 ], [ null, %lor.lhs.false ]
  %known.0 = phi ptr [ %known.1, %for.inc69 ], [ null, %lor.lhs.false ]
  %is_known.0.off0 = phi i1 [ %is_known.1.off0, %for.inc69 ], [ false, %lor.lhs.false ]
  %is_ended.0.off0 = phi i1 [ %tobool67, %for.inc69 ], [ true, %lor.lhs.false ]
  %line_before.0 = phi i64 [ %conv66, %for.inc69 ], [ 0, %lor.lhs.false ]
  %n8.0 = phi i64 [ %inc70, %for.inc69 ], [ 0, %lor.lhs.false ]
  %18 = load i64, ptr %count, align 8
  %cmp10 = icmp ult i64 %n8.0, %18
  br i1 %cmp10, label %for.body11, label %return
for.body11:
  %line12 = getelementptr inbounds nuw i8, ptr %rows, i64 24
  %19 = load ptr, ptr %line12, align 8
  %20 = load ptr, ptr %table, align 8
  %call13 = call ptr %19(ptr %20, i64 %n8.0)
  store i32 0, ptr %number, align 4
  store i8 0, ptr %begins, align 1
  store i8 0, ptr %ends, align 1
  %number14 = getelementptr inbounds nuw i8, ptr %rows, i64 40
  %21 = load ptr, ptr %number14, align 8
  %call15 = call i32 %21(ptr %call13, ptr nonnull %number)
  %begins16 = getelementptr inbounds nuw i8, ptr %rows, i64 56
  %22 = load ptr, ptr %begins16, align 8
  %call17 = call i32 %22(ptr %call13, ptr nonnull %begins)
  %ends18 = getelementptr inbounds nuw i8, ptr %rows, i64 64
  %23 = load ptr, ptr %ends18, align 8
  %call19 = call i32 %23(ptr %call13, ptr nonnull %ends)
  %source20 = getelementptr inbounds nuw i8, ptr %rows, i64 48
  %24 = load ptr, ptr %source20, align 8
  %call21 = call ptr %24(ptr %call13, ptr null, ptr null)
  %cmp22.not = icmp eq ptr %call21, %known.0
  br i1 %cmp22.not, label %if.end26, label %if.then23
if.then23:
  %tobool.i6.not = icmp eq ptr %call21, null
  br i1 %tobool.i6.not, label %if.end26, label %while.cond.i9
while.cond.i9:
  %size.i4.0 = phi i64 [ %inc.i45, %while.body.i44 ], [ 0, %if.then23 ]
  %arrayidx.i10 = getelementptr inbounds i8, ptr %call21, i64 %size.i4.0
  %25 = load i8, ptr %arrayidx.i10, align 1
  %tobool1.i11.not = icmp eq i8 %25, 0
  br i1 %tobool1.i11.not, label %while.end.i12, label %while.body.i44
while.body.i44:
  %inc.i45 = add i64 %size.i4.0, 1
  br label %while.cond.i9
while.end.i12:
  %length.i13 = getelementptr inbounds nuw i8, ptr %rows, i64 80
  %26 = load i64, ptr %length.i13, align 8
  %cmp.i14 = icmp ult i64 %size.i4.0, %26
  br i1 %cmp.i14, label %if.end26, label %lor.lhs.false.i15
lor.lhs.false.i15:
  %length2.i16 = getelementptr inbounds nuw i8, ptr %rows, i64 80
  %27 = load i64, ptr %length2.i16, align 8
  %cmp3.i17 = icmp ugt i64 %size.i4.0, %27
  br i1 %cmp3.i17, label %land.lhs.true.i36, label %if.end10.i18
land.lhs.true.i36:
  %length4.i37 = getelementptr inbounds nuw i8, ptr %rows, i64 80
  %28 = load i64, ptr %length4.i37, align 8
  %29 = xor i64 %28, -1
  %30 = getelementptr i8, ptr %call21, i64 %size.i4.0
  %arrayidx6.i40 = getelementptr i8, ptr %30, i64 %29
  %31 = load i8, ptr %arrayidx6.i40, align 1
  %cmp7.i42.not = icmp eq i8 %31, 47
  br i1 %cmp7.i42.not, label %if.end10.i18, label %if.end26
if.end10.i18:
  br label %for.cond.i19
for.cond.i19:
  %n.i5.0 = phi i64 [ 0, %if.end10.i18 ], [ %inc24.i34, %if.end23.i33 ]
  %length11.i20 = getelementptr inbounds nuw i8, ptr %rows, i64 80
  %32 = load i64, ptr %length11.i20, align 8
  %cmp12.i21 = icmp ult i64 %n.i5.0, %32
  br i1 %cmp12.i21, label %for.body.i23, label %if.end26
for.body.i23:
  %length14.i24 = getelementptr inbounds nuw i8, ptr %rows, i64 80
  %33 = load i64, ptr %length14.i24, align 8
  %sub15.i25 = sub i64 %size.i4.0, %33
  %34 = getelementptr i8, ptr %call21, i64 %sub15.i25
  %arrayidx16.i27 = getelementptr i8, ptr %34, i64 %n.i5.0
  %35 = load i8, ptr %arrayidx16.i27, align 1
  %wanted.i29 = getelementptr inbounds nuw i8, ptr %rows, i64 72
  %36 = load ptr, ptr %wanted.i29, align 8
  %arrayidx18.i30 = getelementptr inbounds i8, ptr %36, i64 %n.i5.0
  %37 = load i8, ptr %arrayidx18.i30, align 1
  %cmp20.i32.not = icmp eq i8 %35, %37
  br i1 %cmp20.i32.not, label %if.end23.i33, label %if.end26
if.end23.i33:
  %inc24.i34 = add i64 %n.i5.0, 1
  br label %for.cond.i19
if.end26:
  %known.1 = phi ptr [ %known.0, %for.body11 ], [ %call21, %for.cond.i19 ], [ %call21, %for.body.i23 ], [ %call21, %while.end.i12 ], [ %call21, %land.lhs.true.i36 ], [ %call21, %if.then23 ]
  %is_known.1.off0 = phi i1 [ %is_known.0.off0, %for.body11 ], [ false, %if.then23 ], [ false, %while.end.i12 ], [ false, %for.body.i23 ], [ false, %land.lhs.true.i36 ], [ true, %for.cond.i19 ]
  %38 = load i8, ptr %begins, align 1
  %tobool27.not = icmp eq i8 %38, 0
  %39 = load i32, ptr %number, align 4
  %tobool28.not = icmp eq i32 %39, 0
  %or.cond = select i1 %tobool27.not, i1 true, i1 %tobool28.not
  %or.cond.not = xor i1 %or.cond, true
  %40 = load i8, ptr %ends, align 1
  %tobool30.not = icmp eq i8 %40, 0
  %or.cond135 = select i1 %or.cond.not, i1 %tobool30.not, i1 false
  %or.cond135.not = xor i1 %or.cond135, true
  %is_known.1.off0.not = xor i1 %is_known.1.off0, true
  %brmerge = select i1 %or.cond135.not, i1 true, i1 %is_known.1.off0.not
  br i1 %brmerge, label %for.inc69, label %land.lhs.true34
land.lhs.true34:
  %41 = load i32, ptr %number, align 4
  %conv35 = sext i32 %41 to i64
  %first = getelementptr inbounds nuw i8, ptr %rows, i64 88
  %42 = load i64, ptr %first, align 8
  %cmp36.not = icmp sgt i64 %42, %conv35
  br i1 %cmp36.not, label %for.inc69, label %land.lhs.true38
land.lhs.true38:
  %43 = load i32, ptr %number, align 4
  %conv39 = sext i32 %43 to i64
  %last = getelementptr inbounds nuw i8, ptr %rows, i64 96
  %44 = load i64, ptr %last, align 8
  %cmp40.not = icmp slt i64 %44, %conv39
  br i1 %cmp40.not, label %for.inc69, label %land.lhs.true42
land.lhs.true42:
  %is_ended.0.off0.not = xor i1 %is_ended.0.off0, true
  %45 = load i32, ptr %number, align 4
  %conv46 = sext i32 %45 to i64
  %cmp47.not = icmp eq i64 %line_before.0, %conv46
  %or.cond136 = select i1 %is_ended.0.off0.not, i1 %cmp47.not, i1 false
  br i1 %or.cond136, label %for.cond.i48, label %if.then51
for.cond.i48:
  %b.addr.i.0 = phi ptr [ %incdec.ptr7.i, %if.end.i53 ], [ %before.0, %land.lhs.true42 ]
  %a.addr.i.0 = phi ptr [ %incdec.ptr.i, %if.end.i53 ], [ %call21, %land.lhs.true42 ]
  %tobool.i49.not = icmp eq ptr %a.addr.i.0, null
  %tobool1.i55.not = icmp eq ptr %b.addr.i.0, null
  %or.cond137 = select i1 %tobool.i49.not, i1 true, i1 %tobool1.i55.not
  %cmp.i56.not = icmp eq ptr %a.addr.i.0, %b.addr.i.0
  %or.cond138 = select i1 %or.cond137, i1 true, i1 %cmp.i56.not
  br i1 %or.cond138, label %for.end.i50, label %land.rhs.i
land.rhs.i:
  %46 = load i8, ptr %a.addr.i.0, align 1
  %47 = load i8, ptr %b.addr.i.0, align 1
  %cmp4.i = icmp eq i8 %46, %47
  br i1 %cmp4.i, label %for.body.i51, label %for.end.i50
for.body.i51:
  %48 = load i8, ptr %a.addr.i.0, align 1
  %tobool6.i.not = icmp eq i8 %48, 0
  br i1 %tobool6.i.not, label %for.inc69, label %if.end.i53
if.end.i53:
  %incdec.ptr.i = getelementptr inbounds nuw i8, ptr %a.addr.i.0, i64 1
  %incdec.ptr7.i = getelementptr inbounds nuw i8, ptr %b.addr.i.0, i64 1
  br label %for.cond.i48
for.end.i50:
  %cmp8.i = icmp eq ptr %a.addr.i.0, %b.addr.i.0
  br i1 %cmp8.i, label %for.inc69, label %if.then51
if.then51:
  %count52 = getelementptr inbounds nuw i8, ptr %rows, i64 120
  %49 = load i64, ptr %count52, align 8
  %room = getelementptr inbounds nuw i8, ptr %rows, i64 112
  %50 = load i64, ptr %room, align 8
  %cmp53 = icmp ult i64 %49, %50
  br i1 %cmp53, label %if.then55, label %if.end62
if.then55:
  %found = getelementptr inbounds nuw i8, ptr %rows, i64 104
  %51 = load ptr, ptr %found, align 8
  %count56 = getelementptr inbounds nuw i8, ptr %rows, i64 120
  %52 = load i64, ptr %count56, align 8
  %arrayidx = getelementptr inbounds %struct.row, ptr %51, i64 %52
  %addr = getelementptr inbounds nuw i8, ptr %rows, i64 32
  %53 = load ptr, ptr %addr, align 8
  %call58 = call i32 %53(ptr %call13, ptr %arrayidx)
  %file59 = getelementptr inbounds nuw i8, ptr %arrayidx, i64 8
  store ptr %call21, ptr %file59, align 8
  %54 = load i32, ptr %number, align 4
  %conv60 = sext i32 %54 to i64
  %line61 = getelementptr inbounds nuw i8, ptr %arrayidx, i64 16
  store i64 %conv60, ptr %line61, align 8
  br label %if.end62
if.end62:
  %count63 = getelementptr inbounds nuw i8, ptr %rows, i64 120
  %55 = load i64, ptr %count63, align 8
  %inc64 = add i64 %55, 1
  store i64 %inc64, ptr %count63, align 8
  br label %for.inc69
for.inc69:
  %56 = load i8, ptr %ends, align 1
  %tobool67 = icmp ne i8 %56, 0
  %57 = load i32, ptr %number, align 4
  %conv66 = sext i32 %57 to i64
  %inc70 = add i64 %n8.0, 1
  br label %for.cond9
return:
  ret i64 0
}
